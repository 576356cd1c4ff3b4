"""A checkpoint's files, written and read as if they came from a stranger.

Reading trusts nothing: no symbolic link is followed, no pickle is opened under whatever name, the header of every
safetensors file must account for each of its bytes, an index must name exactly what is there. Writing reads back what
it wrote and compares it bit for bit.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import UserError
from components.publish.exact_check import LaidOut, require_equal
from components.tensor_headers import headers_in, once, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")


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
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refused, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
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
    """The tensor table of a plain safetensors file; raises UserError, one line."""
    require_plain(file, at)
    return read_header(file, at)


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def tensors_in(folder: Path) -> Mapping[str, Path]:
    """Tensor name -> the file of a model's folder that holds it, from the headers alone."""
    found: dict[str, Path] = {}
    for file, header in headers_in(folder, folder.name):
        found |= dict.fromkeys(header, file)
    return found
