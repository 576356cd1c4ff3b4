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
from pathlib import Path
from typing import Any

from components.contract import Context, UserError
from components.publish.formats import write_format
from components.publish.layout import OwnForm, Source

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "DRAFTSMITH_LLAMA_CPP"
BASES = {"eagle3": "eagle3", "draft-model": "causal-lm"}
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "q8_0"}
"""What the converter is told. Q8_0 has the codes and scales of int8 in groups of 32: it finds ours again, exactly."""
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
        facts = write_format(BASES[own.method], own if few_bits is None else own._replace(storage=None), source, base)
        out = folder / "draft.gguf"
        kind = few_bits.weights if few_bits is not None else facts["dtype"]
        command = [str(base), "--outfile", str(out), "--outtype", TYPES[kind]]
        if own.method == "eagle3":
            command += ["--target-model-dir", str(source.folder)]
        run_converter(converter, command, pre="gpt-2" if source.name == "builtin" else "")
    facts["num_tensors"] = check_gguf(out, out.parent.name)
    return facts if few_bits is None else facts | {"dtype": TYPES[few_bits.weights]}


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
