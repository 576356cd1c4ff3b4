"""A checkpoint's files, written and read as if they came from a stranger.

Reading trusts nothing: no symbolic link is followed, no pickle is opened under whatever name, the header of every
safetensors file must account for each of its bytes, an index must name exactly what is there. Writing reads back what
it wrote and compares it bit for bit.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import UserError
from components.publish.exact_check import LaidOut, require_equal

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")
MAX_HEADER = 100_000_000  # bytes, safetensors' own limit
ITEM_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64} | {
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
}


def write_checkpoint(folder: Path, laid_out: LaidOut, weights_file: str = WEIGHTS) -> LaidOut:
    """Write config.json and the weights; what reading both back gives. Raises UserError when they differ."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(laid_out.tensors.items())}
    save_weights(tensors, folder / weights_file, {"format": "pt"})
    text = json.dumps(laid_out.config, indent=2, allow_nan=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    found = read_checkpoint(folder, folder.name)
    require_equal(tensors, found.tensors, f"{folder.name}/{weights_file}")
    if found.config != laid_out.config:
        raise UserError(f"{folder.name}/{CONFIG}: reads back differently than it was written; check the disk")
    return found


def save_weights(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None) -> None:
    """Write a safetensors file that everybody may read who may read the files beside it.

    safetensors writes a temporary file, which is its owner's alone, and renames it: an engine that runs as another user
    could not open the weights.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    file.chmod(mode)


def read_checkpoint(folder: Path, where: str) -> LaidOut:
    """config.json and every tensor of a folder; raises UserError, one line that names the file, for whatever is odd."""
    if not folder.is_dir():
        raise UserError(f"{where}: no such folder; give the one that holds {CONFIG} and *.safetensors")
    config = read_json(folder / CONFIG, where)
    if config.get("auto_map"):
        raise UserError(
            f"{where}/{CONFIG}: auto_map asks for code of its own; such a checkpoint cannot be checked: remove it"
        )
    files = weight_files(folder, where)
    tensors: dict[str, Tensor] = {}
    for file in files:
        at = f"{where}/{file.name}"
        header = checked_header(file, at)
        if twice := sorted(header.keys() & tensors.keys()):
            raise UserError(f"{at}: {twice[0]} is in another file as well; keep it in one")
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{at}: cannot be read ({' '.join(str(error).split())[:200]}); make it again") from error
    return LaidOut(config, tensors)


def read_json(file: Path, where: str) -> dict[str, Any]:
    """A JSON object from a plain file; raises UserError, one line."""
    at = f"{where}/{file.name}"
    require_plain(file, at)
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refused, object_pairs_hook=_once)
    except ValueError as error:
        raise UserError(f"{at}: not sound JSON ({' '.join(str(error).split())[:200]}); write it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{at}: holds no JSON object; write it again")
    return found


def require_plain(file: Path, at: str) -> None:
    """Raises UserError unless this is a regular file with something in it."""
    if file.is_symlink():
        raise UserError(f"{at}: a symbolic link; a checkpoint holds plain files: copy what it points to (cp -L)")
    if not file.is_file():
        raise UserError(f"{at}: no such file; a checkpoint needs it")
    if file.stat().st_size == 0:
        raise UserError(f"{at}: empty; copy or download it again")


def weight_files(folder: Path, where: str) -> list[Path]:
    """The safetensors files of a folder, sorted; raises UserError for none, for pickles and for a wrong index."""
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    files = sorted(folder.glob("*.safetensors"))
    if pickled:
        raise UserError(f"{where}/{pickled[0]}: pickled weights, which run code when opened; convert to safetensors")
    if not files:
        raise UserError(f"{where}: no *.safetensors in it; a checkpoint needs weights")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_index(index, files, where)
    if len(files) > 1 and not list(folder.glob("*.safetensors.index.json")):
        raise UserError(f"{where}: {len(files)} weight files and no index that says what is where; write the index")
    return files


def _check_index(index: Path, files: list[Path], where: str) -> None:
    at = f"{where}/{index.name}"
    named = read_json(index, where).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
        raise UserError(f"{at}: no weight_map of tensor names to files; write it again")
    by_name = {file.name: file for file in files}
    strange = sorted(set(named.values()) - set(by_name))
    if strange:
        raise UserError(f"{at}: names the file {strange[0]!r:.80}, which is not in the folder")
    there = {tensor: file.name for file in files for tensor in checked_header(file, f"{where}/{file.name}")}
    wrong = sorted(name for name in there.keys() | named.keys() if there.get(name) != named.get(name))
    if wrong:
        raise UserError(
            f"{at}: says {wrong[0]} is in {named.get(wrong[0], 'no file')}, it is in {there.get(wrong[0], 'none')}"
        )


def checked_header(file: Path, at: str) -> dict[str, Any]:
    """The tensor table of a safetensors file, after it has accounted for every byte; raises UserError, one line."""
    require_plain(file, at)
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
                raise UserError(f"{at}: a pickle under a safetensors name, which runs code when opened; do not open it")
            raise UserError(f"{at}: no safetensors file, or cut short; copy or download it again")
        try:
            header = json.loads(stream.read(length), object_pairs_hook=_once)
        except ValueError as error:
            raise UserError(f"{at}: its header is damaged ({str(error)[:100]}); copy or download it again") from error
    if not isinstance(header, dict):
        raise UserError(f"{at}: its header is no table of tensors; copy or download it again")
    header.pop("__metadata__", None)
    spans = sorted(_span(name, entry, at) for name, entry in header.items())
    end = 0
    for first, last, name in spans:
        if first != end:
            raise UserError(f"{at}: {name} begins at byte {first}, where {end} is next: the header lies")
        end = last
    if 8 + length + end != size:
        short = "cut short" if 8 + length + end > size else "followed by bytes that no tensor owns"
        raise UserError(f"{at}: {short} ({size} bytes, its header asks for {8 + length + end}); copy it again")
    return header


def _span(name: str, entry: Any, at: str) -> tuple[int, int, str]:
    """(first byte, byte after the last, name) of one entry of a header."""
    try:
        dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = all(type(extent) is int and extent >= 0 for extent in (*shape, first, last))
        bits = math.prod(shape) * ITEM_BITS[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{at}: the header's entry for {name} cannot be understood ({error!r:.80})") from error
    if not whole or (last - first) * 8 != bits:
        raise UserError(f"{at}: {name} is said to be {dtype} {shape} in {last - first} bytes: the header lies")
    return first, last, name


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' stands twice")
    return found


def tensors_in(folder: Path) -> Mapping[str, Path]:
    """Tensor name -> the file of a model's folder that holds it, from the headers alone."""
    from components.targets.inspect_files import read_header

    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):  # which may be links: hub caches are made of them
        found |= dict.fromkeys(read_header(file, folder.name), file)
    return found
