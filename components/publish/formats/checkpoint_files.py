"""Read and write the files of a checkpoint, without trusting them.

Reading follows no symbolic link and opens no pickled file. The header of every safetensors file must account for each
of its bytes, and an index must name exactly the tensors in the files. Writing reads the files back and compares them
bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import UserError
from components.outside_json import JsonObject
from components.publish.formats.exact_check import Checkpoint, require_equal
from components.tensor_files import headers_in, read_header, unique_names

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")


def write_checkpoint(folder: Path, checkpoint: Checkpoint, weights_file: str = WEIGHTS) -> Checkpoint:
    """Write config.json and the weights, and return the checkpoint read back. Raises UserError when it differs."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(checkpoint.tensors.items())}
    save_weights(tensors, folder / weights_file, {"format": "pt"})
    text = json.dumps(checkpoint.config, indent=2, allow_nan=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    written = read_checkpoint(folder, folder.name)
    require_equal(tensors, written.tensors, f"{folder.name}/{weights_file}")
    if written.config != checkpoint.config:
        raise UserError(f"{folder.name}/{CONFIG}: reads back differently than it was written; check the disk")
    return written


def save_weights(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None) -> None:
    """Write a safetensors file with the permissions of ordinary new files.

    safetensors renames a temporary file that only its owner can read: an engine run by another user could not open it.
    """
    file.touch()
    mode = stat.S_IMODE(file.stat().st_mode)
    save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    file.chmod(mode)


def link_or_copy(file: Path, copy: Path) -> None:
    """Make `copy` the same file as `file`: a hard link where the disk allows it, else a copy."""
    copy.unlink(missing_ok=True)
    try:
        os.link(file.resolve(), copy)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, copy)


def read_checkpoint(folder: Path, location: str) -> Checkpoint:
    """config.json and every tensor of a folder. Raises UserError, one line that names the file, for any fault."""
    if not folder.is_dir():
        raise UserError(f"{location}: no such folder; give the one that holds {CONFIG} and *.safetensors")
    config = read_json(folder / CONFIG, location)
    if config.get("auto_map"):
        raise UserError(
            f"{location}/{CONFIG}: auto_map asks for code of its own; such a checkpoint cannot be checked: remove it"
        )
    files = weight_files(folder, location)
    tensors: dict[str, Tensor] = {}
    for file in files:
        label = f"{location}/{file.name}"
        header = checked_header(file, label)
        if twice := sorted(header.keys() & tensors.keys()):
            raise UserError(f"{label}: {twice[0]} is in another file as well; keep it in one")
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{label}: cannot be read ({' '.join(str(error).split())[:200]}); make it again") from error
    return Checkpoint(config, tensors)


def read_json(file: Path, location: str) -> JsonObject:
    """The JSON object in a regular file. Raises UserError, one line."""
    label = f"{location}/{file.name}"
    require_plain(file, label)
    try:
        content = json.loads(
            file.read_text(encoding="utf-8"), parse_constant=_refuse_constant, object_pairs_hook=unique_names
        )
    except (ValueError, RecursionError) as error:
        raise UserError(f"{label}: not sound JSON ({' '.join(str(error).split())[:200]}); write it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{label}: holds no JSON object; write it again")
    return content


def require_plain(file: Path, label: str) -> None:
    """Raises UserError unless this is a regular file that is not empty."""
    if file.is_symlink():
        raise UserError(f"{label}: a symbolic link; a checkpoint holds plain files: copy what it points to (cp -L)")
    if not file.is_file():
        raise UserError(f"{label}: no such file; a checkpoint needs it")
    if file.stat().st_size == 0:
        raise UserError(f"{label}: empty; copy or download it again")


def weight_files(folder: Path, location: str) -> list[Path]:
    """The safetensors files of a folder, sorted. Raises UserError for none, for pickles and for a wrong index."""
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    files = sorted(folder.glob("*.safetensors"))
    if pickled:
        raise UserError(f"{location}/{pickled[0]}: pickled weights, which run code when opened; convert to safetensors")
    if not files:
        raise UserError(f"{location}: no *.safetensors in it; a checkpoint needs weights")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_index(index, files, location)
    if len(files) > 1 and not list(folder.glob("*.safetensors.index.json")):
        raise UserError(f"{location}: {len(files)} weight files and no index that says what is where; write the index")
    return files


def _check_index(index: Path, files: list[Path], location: str) -> None:
    label = f"{location}/{index.name}"
    listed = read_json(index, location).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(value, str) for value in listed.values()):
        raise UserError(f"{label}: no weight_map of tensor names to files; write it again")
    by_name = {file.name: file for file in files}
    unknown = sorted(set(listed.values()) - set(by_name))
    if unknown:
        raise UserError(f"{label}: names the file {unknown[0]!r:.80}, which is not in the folder")
    stored = {tensor: file.name for file in files for tensor in checked_header(file, f"{location}/{file.name}")}
    wrong = sorted(name for name in stored.keys() | listed.keys() if stored.get(name) != listed.get(name))
    if wrong:
        raise UserError(
            f"{label}: says {wrong[0]} is in {listed.get(wrong[0], 'no file')}, it is in {stored.get(wrong[0], 'none')}"
        )


def checked_header(file: Path, label: str) -> JsonObject:
    """The tensor table of a safetensors file, without its data. Raises UserError, one line."""
    require_plain(file, label)
    return read_header(file, label)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def tensors_in(folder: Path) -> Mapping[str, Path]:
    """Tensor name -> the file of a model's folder that holds it, read from the headers only."""
    files: dict[str, Path] = {}
    for file, header in headers_in(folder, folder.name):
        files |= dict.fromkeys(header, file)
    return files
