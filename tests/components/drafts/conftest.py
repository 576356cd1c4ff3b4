"""Real tiny targets, made and opened once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_targets import make_tiny_target

from components.targets.interface import AbstractTarget
from components.targets.load import open_target


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family -> folder of a tiny target in Hugging Face format."""
    root, made = tmp_path_factory.mktemp("drafts"), {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_target(family, root / family)  # type: ignore[arg-type]
        return made[family]

    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Callable[[str], Path]) -> Callable[[str], AbstractTarget]:
    """family -> an opened tiny target in float32."""
    opened: dict[str, AbstractTarget] = {}

    def target(family: str = "llama") -> AbstractTarget:
        torch.set_num_threads(1)
        if family not in opened:
            opened[family] = open_target(tiny_folder(family), dtype="float32", kernel="plain")
        return opened[family]

    return target
