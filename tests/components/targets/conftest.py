"""Tiny targets, made once a session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_targets import FAMILIES, OURS, make_tiny_target


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny passes gain nothing from a second thread and lose a lot on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """family -> folder in Hugging Face format."""
    root = tmp_path_factory.mktemp("targets")
    return {family: make_tiny_target(family, root / family) for family in {*FAMILIES, *OURS}}


@pytest.fixture
def copied(tmp_path: Path, tiny_targets: dict[str, Path]) -> Path:
    return Path(shutil.copytree(tiny_targets["qwen3"], tmp_path / "model"))
