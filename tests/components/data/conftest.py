"""Tiny passes gain nothing from a second thread and lose a lot on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from workload_files import write_copies


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Every test of this room runs on one thread."""
    torch.set_num_threads(1)


@pytest.fixture
def copies(tmp_path: Path) -> dict[str, str]:
    """A tiny copy of every preset's files: what a source's `path` says, by preset."""
    return write_copies(tmp_path)
