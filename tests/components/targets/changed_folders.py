"""Folders of a target with a changed configuration, and a context for the step that loads one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from components.contract import Context


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k" * 64, out=folder, scratch=folder, num_threads=1)


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """What changes the tensors of a folder's only file of weights, in place."""

    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return spoil


def without_tensor(name: str) -> Callable[[Path], None]:
    """What takes one tensor out of a folder."""
    return changed_tensors(lambda weights: weights.pop(name))
