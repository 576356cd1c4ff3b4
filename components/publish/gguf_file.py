"""A drafter as the GGUF file that llama.cpp loads, made by llama.cpp's own converter where it is installed.

The converter reads an EAGLE-3 folder beside its target, or an ordinary Llama; it runs in a process of its own, on a
folder that has passed our checks, and what it wrote is looked at again: the table of tensors, and the draft vocabulary.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from components.contract import Context, UserError
from components.drafts.quantised import Packed
from components.publish.formats import write_format
from components.publish.layout import OwnForm, Source
from components.publish.profiles import GGUF_BASES
from components.targets.source import BUILTIN, local_folder

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "DRAFTSMITH_LLAMA_CPP"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "q8_0"}
"""What the converter is told. Q8_0 has the codes of int8 in groups of 32 and finds ours again; rounded_scales()."""
TIMEOUT_S = 3600


def find_converter(named: str = "") -> Path | None:
    """The folder with llama.cpp's converter: as named, by $DRAFTSMITH_LLAMA_CPP, or on the PATH; None without one.

    Raises UserError for a named folder that holds none.
    """
    told = named or os.environ.get(VARIABLE, "")
    if told:
        folder = Path(told).expanduser().resolve()
        if not (folder / CONVERTER).is_file():
            raise UserError(f"llama_cpp: {told}: no {CONVERTER} in it; name the folder of llama.cpp's sources")
        return folder
    found = shutil.which(CONVERTER)
    return Path(found).resolve().parent if found else None


def write_gguf(own: OwnForm, source: Source, folder: Path, llama_cpp: str, ctx: Context) -> dict[str, Any] | None:
    """Write `draft.gguf` into a folder; None, with a note that says why, where the converter is not installed."""
    converter = find_converter(llama_cpp)
    if converter is None:
        ctx.note(f"no GGUF: llama.cpp's {CONVERTER} is not installed; set {VARIABLE} to its folder, or llama_cpp")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ctx.scratch) as work:
        base = Path(work) / "draft"
        few_bits = own.storage if own.storage is not None and own.storage.bits else None
        # The converter reads floats and packs them itself: the float32 that the codes stand for loses nothing.
        facts = write_format(
            GGUF_BASES[own.method], own if few_bits is None else own._replace(storage=None), source, base
        )
        out = folder / "draft.gguf"
        kind = few_bits.weights if few_bits is not None else facts["dtype"]
        command = [str(base), "--outfile", str(out), "--outtype", TYPES[kind]]
        if own.method == "eagle3":
            command += ["--target-model-dir", str(source.folder)]
        run_converter(converter, command, pre=unknown_pre_tokenizer(source))
    facts["num_tensors"] = check_gguf(out, out.parent.name)
    if remark := rounded_scales(own.packed.values()):
        ctx.note(f"gguf: {remark}")
    return facts if few_bits is None else facts | {"dtype": TYPES[few_bits.weights]}


def unknown_pre_tokenizer(source: Source) -> str:
    """What the converter has to be told of a tokenizer that it has never seen, the built-in target's; "" for others.

    The target's name is what others may read, and need not be its own: the folder tells which target it is.
    """
    return "gpt-2" if source.folder is not None and source.folder == local_folder(BUILTIN) else ""


def rounded_scales(layers: Iterable[Packed]) -> str:
    """What Q8_0, whose scales are float16, changes in packed weights, one sentence; "" where it holds them exactly.

    A bfloat16 scale is a float16 from 2^-17 on. Below it the grid of float16 is coarser: a group whose largest weight
    is under 127 x 2^-17, about 0.001, comes out otherwise than it was measured.

    Raises:
        UserError: a scale that is too large for float16.
    """
    scales = [layer.scale.float().flatten() for layer in layers if bool(layer.packed.numel())]
    if not scales:
        return ""
    every = torch.cat(scales)
    every = every[every != 1.0]  # a group of zeros has scale 1
    held = every.half().float()
    if bool(torch.isinf(held).any()):
        raise UserError(f"gguf: a scale of {float(every.max()):.3g} is too large for Q8_0, whose scales are float16")
    changed = held != every
    if not bool(changed.any()):
        return ""
    most = float((held - every).abs().max()) * 127
    return (
        f"{int(changed.sum())} of {every.numel()} scales are too small for float16, in which Q8_0 keeps them: weights"
        f" of those groups differ from what was measured by {most:.2g} at most"
    )


def run_converter(converter: Path, arguments: list[str], *, pre: str = "") -> None:
    """Run llama.cpp's converter; raises UserError with its last line where it fails.

    pre: the pre-tokenizer to answer for a tokenizer that the converter has never seen; "" lets it refuse.
    """
    script = Path(__file__).with_name("gguf_converter.py")
    command = [sys.executable, str(script), str(converter), pre or "-", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"gguf: {CONVERTER} did not end within {TIMEOUT_S} s") from error
    if done.returncode != 0:
        said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(f"gguf: llama.cpp's converter refused it: {(said or ['no reason given'])[-1][:250]}")


def check_gguf(file: Path, where: str) -> int:
    """The number of tensors in a GGUF file; raises UserError unless it is one and holds some.

    Its first 24 bytes: "GGUF", version (uint32), number of tensors and of metadata entries (uint64 each).
    """
    at = f"{where}/{file.name}"
    head = b""
    if file.is_file():
        with file.open("rb") as stream:
            head = stream.read(24)
    count = int.from_bytes(head[8:16], "little")
    if head[:4] != b"GGUF" or int.from_bytes(head[4:8], "little") not in (2, 3) or not 0 < count < 100_000:
        raise UserError(f"{at}: no sound GGUF file; convert it again")
    return count
