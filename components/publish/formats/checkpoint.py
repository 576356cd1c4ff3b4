"""A checkpoint in some format: its files, read and written without trust, and the exact checks that it must pass.

Engines accept faulty files (a missing norm loads silently, a wrong offset crashes while generating). So names, shapes,
dtypes, the draft vocabulary and the values must be exactly what an engine expects before anything is written, and the
written files are read back, compared bit for bit and checked again.

Reading follows no symbolic link and opens no pickled file. The header of every safetensors file must account for each
of its bytes, and an index must name exactly the tensors in the files.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import UserError
from components.outside_json import JsonObject
from components.tensor_files import headers_in, read_header, require_finite, unique_names

Config = Mapping[str, Any]
"""A checkpoint's config.json: anybody's, so that every field is checked where it is read."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Spec(NamedTuple):
    """The shape and dtype that one tensor must have. dtype None: the one floating dtype that all weights share."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    optional: bool = False


class Checkpoint(NamedTuple):
    """A checkpoint in some format: its config.json and its tensors under that format's names."""

    config: JsonObject
    tensors: dict[str, Tensor]


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Spec], location: str) -> None:
    """Compare names, shapes and dtypes with the expected ones. Raises UserError, one line, for the first fault."""
    missing = sorted(name for name, spec in expected.items() if not spec.optional and name not in tensors)
    if missing:
        raise UserError(f"{location}: {abbreviate(missing)} missing; the drafter was not saved whole, make it again")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UserError(
            f"{location}: {abbreviate(extra)} not part of this layout; export it in the layout of its own method"
        )
    floats = {t.dtype for name, t in tensors.items() if expected[name].dtype is None}
    for name, tensor in sorted(tensors.items()):
        spec = expected[name]
        if tuple(tensor.shape) != spec.shape:
            raise UserError(f"{location}: {name} is {list(tensor.shape)}, must be {list(spec.shape)}")
        if spec.dtype is not None and tensor.dtype != spec.dtype:
            raise UserError(f"{location}: {name} is {name_of(tensor.dtype)}, must be {name_of(spec.dtype)}")
        if spec.dtype is None and tensor.dtype not in FLOATS:
            raise UserError(
                f"{location}: {name} is {name_of(tensor.dtype)}, weights are {abbreviate(map(name_of, FLOATS))}"
            )
        require_finite({name: tensor}, location, "the training run diverged, do not publish it")
    if len(floats) > 1:
        raise UserError(f"{location}: weights mix {abbreviate(sorted(map(name_of, floats)))}; all must share one dtype")


def check_stated_dtype(config: Config, tensors: Mapping[str, Tensor], location: str) -> None:
    """Check that config.json states the weights' dtype, under either of its two keys. Raises UserError."""
    stored = {name_of(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    for key in ("torch_dtype", "dtype"):
        if config.get(key) is not None and stored and [config[key]] != sorted(stored):
            raise UserError(
                f"{location}/config.json: {key} is {config[key]!r:.60}, the weights are {abbreviate(sorted(stored))}"
            )


def check_vocabulary(d2t: Tensor, t2d: Tensor, location: str) -> None:
    """Check that d2t holds offsets (target id = i + d2t[i]) of ascending ids below V, and t2d marks the same ids.

    d2t: int64 [N]. t2d: bool [V]. Raises UserError, one line.
    """
    ids = d2t + torch.arange(d2t.numel())
    vocab_size = t2d.numel()
    ascending = bool((ids.diff() > 0).all())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not (ascending and inside):
        absolute = bool((d2t.diff() > 0).all()) and bool(((d2t >= 0) & (d2t < vocab_size)).all())
        same = absolute and torch.equal(t2d.nonzero().flatten(), d2t)
        if same:
            raise UserError(f"{location}: d2t holds target ids, must hold offsets (target id - draft id)")
        what = "leave the target's vocabulary" if not inside else "do not ascend"
        raise UserError(f"{location}: d2t is wrong: the target ids i + d2t[i] {what} (0..{vocab_size - 1})")
    if not torch.equal(t2d.nonzero().flatten(), ids):
        absolute = torch.equal(t2d.nonzero().flatten(), d2t)
        hint = "d2t holds target ids, must hold offsets" if absolute else "one of the two was changed alone"
        raise UserError(f"{location}: t2d and d2t name different tokens; {hint}")


def require_equal(written: Mapping[str, Tensor], read_back: Mapping[str, Tensor], location: str) -> None:
    """Raises UserError unless two sets of tensors are equal bit for bit, dtypes included."""
    different = sorted(set(written) ^ set(read_back))
    for name in sorted(set(written) & set(read_back)):
        a, b = written[name], read_back[name]
        # Bytes, not values: -0.0 == 0.0 would pass, and a NaN is never equal to itself.
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bytes(a), _bytes(b)):
            different.append(name)
    if different:
        raise UserError(
            f"{location}: {abbreviate(different)} read back differently than written; check the disk and export again"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """A dtype without its prefix: float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def abbreviate(names: Iterable[str]) -> str:
    """At most three names, and the number of the others."""
    listed = list(names)
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + rest


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
