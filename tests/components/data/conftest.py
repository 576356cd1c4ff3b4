"""Tiny passes gain nothing from a second thread and lose a lot on a busy machine."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Every test of this room runs on one thread."""
    torch.set_num_threads(1)
