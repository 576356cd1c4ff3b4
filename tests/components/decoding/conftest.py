"""A tiny float32 target with random but decided weights: real passes, no training, no files."""

from __future__ import annotations

import pytest
import torch
from tiny_targets import open_in_memory, tiny_llama

from components.targets.forward.llama import FastTarget


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny passes gain nothing from a second thread and lose a lot on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> FastTarget:
    torch.set_num_threads(1)
    return open_in_memory(tiny_llama(32, lambda name: 8.0))
