"""A drafter as the GGUF file that llama.cpp loads, made by llama.cpp's own converter where it is installed.

The converter reads the folder of an EAGLE-3, DFlash or DSpark drafter and its target's, or an ordinary Llama. It runs
in a process of its own on a folder that has passed our checks, and the header of the file that it writes is checked.

The search for private names reads a file's metadata without its vocabulary, which is megabytes of meaningless words;
the entries after it, such as the chat template, matter. The reader of package `gguf` takes 7 s and 500 MB for a
vocabulary of 150,000 (this one: 0.1 s), and takes a text that is cut short for a whole one.
Form: magic, version u32, tensors u64, entries u64. An entry is a name (u64 length, UTF-8), a type u32 and a value. A
string is stored like a name; an array is a type u32, a count u64 and the values.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from components.contract import Context, UserError
from components.drafts.storage.quantisation import Packed
from components.methods import METHODS
from components.outside_json import read_object
from components.publish.formats.interface import DrafterState, Source
from components.publish.formats.registry import write_format
from components.release_record import WeightCounts, write_json
from components.targets.source import BUILTIN, local_folder

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "DRAFTSMITH_LLAMA_CPP"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "q8_0"}
"""dtype -> --outtype of the converter. Q8_0 stores int8 codes in groups of 32, which are ours; see rounded_scales()."""
TIMEOUT_S = 3600


def find_converter(named: str = "") -> Path | None:
    """The folder with llama.cpp's converter: `named`, $DRAFTSMITH_LLAMA_CPP or on the PATH; None where there is none.

    Raises UserError for a named folder without it.
    """
    folder_name = named or os.environ.get(VARIABLE, "")
    if folder_name:
        folder = Path(folder_name).expanduser().resolve()
        if not (folder / CONVERTER).is_file():
            raise UserError(f"llama_cpp: {folder_name}: no {CONVERTER} in it; name the folder of llama.cpp's sources")
        return folder
    script = shutil.which(CONVERTER)
    return Path(script).resolve().parent if script else None


def write_gguf(
    drafter: DrafterState, source: Source, folder: Path, llama_cpp: str, ctx: Context
) -> WeightCounts | None:
    """Write `draft.gguf` into a folder and return its facts; None and a note where the converter is missing."""
    converter = find_converter(llama_cpp)
    if converter is None:
        ctx.note(f"no GGUF: llama.cpp's {CONVERTER} is not installed; set {VARIABLE} to its folder, or llama_cpp")
        return None
    if drafter.settings.get("window"):
        raise UserError("gguf: llama.cpp lets a drafter attend to everything, and this one sees a window; leave it out")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ctx.scratch) as work:
        base = Path(work) / "draft"
        few_bits = drafter.storage if drafter.storage is not None and drafter.storage.bits else None
        # The converter reads floats and packs them itself: the dequantised float32 lose nothing.
        format = METHODS[drafter.method].gguf_base
        assert format is not None, "gguf is written for methods that llama.cpp's converter reads"
        facts = write_format(format, drafter if few_bits is None else drafter._replace(storage=None), source, base)
        out = folder / "draft.gguf"
        kind = few_bits.weights if few_bits is not None else facts["dtype"]
        command = [str(base), "--outfile", str(out), "--outtype", TYPES[kind]]
        if METHODS[drafter.method].reads_taps:
            command += ["--target-model-dir", str(source.folder)]
        if drafter.method == "dflash":
            name_as_dspark(base)
        run_converter(converter, command, pre=unknown_pre_tokenizer(source))
    facts["num_tensors"] = check_gguf(out, out.parent.name)
    if remark := rounded_scales(drafter.packed.values()):
        ctx.note(f"gguf: {remark}")
    return facts if few_bits is None else facts | {"dtype": TYPES[few_bits.weights]}


def name_as_dspark(folder: Path) -> None:
    """Name DFlash in the layout of speculators as the converter knows that layout: as DSpark, here without its heads.

    Its class for DFlash reads z-lab's layout alone, which has no draft vocabulary; the file is the same architecture.
    """
    config = read_object(folder / "config.json")
    write_json(folder / "config.json", config | {"architectures": ["DSparkDraftModel"]})


def unknown_pre_tokenizer(source: Source) -> str:
    """The pre-tokenizer that the converter must be given for the built-in target's tokenizer; "" for other targets.

    The folder decides, not the name, which the user may have chosen.
    """
    return "gpt-2" if source.folder is not None and source.folder == local_folder(BUILTIN) else ""


def rounded_scales(layers: Iterable[Packed]) -> str:
    """How Q8_0, whose scales are float16, changes packed weights, in one sentence; "" where it stores them exactly.

    Every bfloat16 scale from 2^-17 on is a float16. Below, float16 is coarser: the weights of a group whose largest one
    is under 127 x 2^-17, about 0.001, differ from the measured ones.

    Raises:
        UserError: a scale that is too large for float16.
    """
    scales = [layer.scale.float().flatten() for layer in layers if bool(layer.packed.numel())]
    if not scales:
        return ""
    every = torch.cat(scales)
    every = every[every != 1.0]  # a group of zeros has scale 1
    as_half = every.half().float()
    if bool(torch.isinf(as_half).any()):
        raise UserError(f"gguf: a scale of {float(every.max()):.3g} is too large for Q8_0, whose scales are float16")
    changed = as_half != every
    if not bool(changed.any()):
        return ""
    most = float((as_half - every).abs().max()) * 127
    return (
        f"{int(changed.sum())} of {every.numel()} scales are too small for float16, in which Q8_0 keeps them: weights"
        f" of those groups differ from what was measured by {most:.2g} at most"
    )


def run_converter(converter: Path, arguments: list[str], *, pre: str = "") -> None:
    """Run llama.cpp's converter. Raises UserError with its last line where it fails.

    pre: the pre-tokenizer to use for a tokenizer that the converter does not know; "" lets it refuse.
    """
    script = Path(__file__).with_name("gguf_converter.py")
    command = [sys.executable, str(script), str(converter), pre or "-", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"gguf: {CONVERTER} did not end within {TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(f"gguf: llama.cpp's converter refused it: {(lines or ['no reason given'])[-1][:250]}")


def check_gguf(file: Path, location: str) -> int:
    """The number of tensors in a GGUF file. Raises UserError unless it is one and has tensors.

    Its first 24 bytes: "GGUF", version (uint32), number of tensors and of metadata entries (uint64 each).
    """
    at = f"{location}/{file.name}"
    head = b""
    if file.is_file():
        with file.open("rb") as stream:
            head = stream.read(24)
    count = int.from_bytes(head[8:16], "little")
    if head[:4] != b"GGUF" or int.from_bytes(head[4:8], "little") not in (2, 3) or not 0 < count < 100_000:
        raise UserError(f"{at}: no sound GGUF file; convert it again")
    return count


STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type -> bytes of a value of fixed size."""
SHORT_LIST = 64
"""Longer lists of strings are vocabularies and merges, which are skipped."""


def gguf_texts(file: Path) -> list[str]:
    """Names and strings of a file's metadata, without lists of more than SHORT_LIST. Raises UserError, one line."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).texts()
    except (IndexError, KeyError, ValueError) as error:
        raise UserError(
            f"{file.parent.name}/{file.name}: no sound GGUF file ({error!r:.60}); convert it again"
        ) from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def texts(self) -> list[str]:
        if self._take(4) != b"GGUF":
            raise ValueError("other first bytes")
        self._number(4)
        self._number(8)
        texts: list[str] = []
        for _ in range(self._number(8)):
            texts.append(self._string())
            texts += self._value(self._number(4))
        return texts

    def _value(self, kind: int) -> list[str]:
        if kind == STRING:
            return [self._string()]
        if kind != ARRAY:
            self._take(SIZES[kind])
            return []
        inner, count = self._number(4), self._number(8)
        if inner != STRING:
            self._skip(SIZES[inner] * count)
            return []
        if count <= SHORT_LIST:
            return [self._string() for _ in range(count)]
        for _ in range(count):
            self._skip(self._number(8))
        return []

    def _string(self) -> str:
        return self._take(self._number(8)).decode("utf-8", errors="replace")

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        start = self.at
        self._skip(size)
        return self.data[start : self.at]

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("cut short")
