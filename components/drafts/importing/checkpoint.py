"""A drafter's checkpoint as it was found: config.json, the tensors that its files name, and what is wrong with them.

Reading trusts nothing: weights are safetensors whose headers account for every byte, no pickle is opened, and no code
that comes with a checkpoint runs. Tensors are read when they are asked for, since a module inside a large model's own
checkpoint is a small part of its files.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from components.contract import UserError
from components.drafts.storage.quantisation import PACKED, SCALE, SHAPE, WEIGHT, dequantise_tensors, parse_storage
from components.machine import free_ram
from components.outside_json import JsonObject, read_object
from components.tensor_files import TensorEntry, headers_in, require_finite
from components.text import message_of
from components.weight_format import Storage

CONFIG = "config.json"
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt", ".pickle")
MAX_CONFIG_BYTES = 16 << 20
OWN_CONFIG_CLASSES = ("Eagle3SpeculatorConfig", "PEagleSpeculatorConfig", "MTPSpeculatorConfig")
"""Classes of the speculators library that its releases name in auto_map; nothing of them is needed to read the file."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in a folder. label: its name in errors. files: tensor -> its file. entries: tensor -> its header.

    storage: how its weights were rounded by compressed-tensors; a packed layer then is in `files` as the weight that it
    stands for, and is read dequantised. None: as they are, or quantised in a way that is not read here.
    """

    label: str
    folder: Path
    config: JsonObject
    files: Mapping[str, Path]
    entries: Mapping[str, TensorEntry]
    storage: Storage | None = None

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Some of its tensors as they are stored.

        Raises:
            UserError: one cannot be read or holds NaN, or the memory has no room for all of them in float32.
        """
        tensors: dict[str, Tensor] = {}
        by_file: dict[Path, list[str]] = {}
        wanted = list(names)
        needed, free = 4 * self.num_elements(wanted), free_ram()
        if needed > free:
            raise UserError(
                f"{self.label}: takes {needed / 1e9:.1f} GB as float32, and {free / 1e9:.1f} GB of memory are free"
            )
        for name in wanted:
            module = name.removesuffix(WEIGHT)
            packed = self.storage is not None and module + PACKED in self.entries
            inside = (
                [module + end for end in (PACKED, SCALE, SHAPE) if module + end in self.entries] if packed else [name]
            )
            by_file.setdefault(self.files[name], []).extend(inside)
        for file, inside in by_file.items():
            try:
                with safe_open(file, framework="pt") as stream:
                    tensors |= {name: stream.get_tensor(name) for name in inside}
            except (SafetensorError, OSError, ValueError) as error:
                reason = message_of(error, 160)
                raise UserError(f"{self.label}/{file.name}: cannot be read ({reason}); download it again") from error
        if self.storage is not None:
            tensors = dequantise_tensors(tensors, self.storage, self.label)
        require_finite(tensors, self.label, "such a drafter guesses nothing: take another checkpoint")
        return tensors

    def num_elements(self, names: Iterable[str]) -> int:
        """Numbers in some of its tensors."""
        shapes = (self.entries.get(name, self.entries.get(name.removesuffix(WEIGHT) + PACKED)) for name in names)
        return sum(math.prod(entry["shape"]) for entry in shapes if entry is not None)


def find_checkpoint(folder: Path, label: str) -> FoundCheckpoint:
    """The checkpoint in a folder, by its config.json and the headers of its weight files.

    Raises:
        UserError: no config, no safetensors, a damaged header, a tensor in two files, or code of its own is asked for.
    """
    if not folder.is_dir():
        raise UserError(f"{label}: no such folder; give the one that holds {CONFIG} and *.safetensors")
    if not (folder / CONFIG).is_file():
        raise UserError(f"{label}: no {CONFIG} in it; a drafter's checkpoint has one beside its weights")
    config = read_object(folder / CONFIG, MAX_CONFIG_BYTES)
    _refuse_code(config, label)
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
        content = (
            f"only pickled weights ({pickled[0]}), which run code when opened; convert them to safetensors"
            if pickled
            else "no weights"
        )
        raise UserError(f"{label}: no *.safetensors in it: {content}")
    files: dict[str, Path] = {}
    entries: dict[str, TensorEntry] = {}
    for file, header in headers_in(folder, label):
        if twice := sorted(header.keys() & files.keys()):
            raise UserError(f"{label}: {twice[0]} is in {files[twice[0]].name} and in {file.name}; keep it in one")
        files |= dict.fromkeys(header, file)
        entries |= header
    if not files:
        raise UserError(f"{label}: its weight files hold no tensor; download it again")
    if not any(name.endswith(PACKED) for name in files):
        return FoundCheckpoint(label, folder, config, files, entries)
    storage = parse_storage(config, label)
    if storage is None:
        raise UserError(
            f"{label}: has packed weights, and {CONFIG} says no quantization_config; it was not saved whole"
        )
    plain = {name: file for name, file in files.items() if not name.endswith((PACKED, SCALE, SHAPE))}
    packed = {name.removesuffix(PACKED) + WEIGHT: file for name, file in files.items() if name.endswith(PACKED)}
    return FoundCheckpoint(label, folder, config, plain | packed, entries, storage)


def require_room(num_elements: int, out: Path, label: str) -> None:
    """Raise UserError where the disk has no room for so many float32 numbers under `out`."""
    needed, free = 4 * num_elements, shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            f"{label}: takes {needed / 1e9:.1f} GB as float32, and {free / 1e9:.1f} GB are free for it on the disk of"
            " the store; make room"
        )


def _refuse_code(config: JsonObject, label: str) -> None:
    """Raise UserError for a config that asks for code of its own: who knows what that code computes."""
    named = config.get("auto_map")
    if not named:
        return
    values = named.values() if isinstance(named, dict) else [named]
    if not all(isinstance(value, str) and value.rpartition(".")[2] in OWN_CONFIG_CLASSES for value in values):
        raise UserError(
            f"{label}/{CONFIG}: auto_map asks for code of its own ({named!s:.80}), which is never run; a drafter in"
            " a known format needs none: remove the entry if it is one"
        )
