"""Artifacts and contexts for the speedup steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from components.contract import Context, Measurements
from components.rows import write_rows


@pytest.fixture
def measurements(tmp_path: Path) -> Callable[..., Measurements]:
    """Rows -> a Measurements artifact."""

    def make(rows: list[object]) -> Measurements:
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        write_rows(path, rows)
        return Measurements(key=path.name, path=path)

    return make


@pytest.fixture
def new_ctx(tmp_path: Path) -> Callable[..., Context]:
    """A fresh context."""

    def make(seed: int = 0) -> Context:
        path = tmp_path / f"c{len(list(tmp_path.iterdir()))}"
        (path / "scratch").mkdir(parents=True)
        return Context(key=path.name, out=path, scratch=path / "scratch", seed=seed)

    return make
