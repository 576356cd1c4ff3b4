"""What the tests of linear layers share: how often kernels were timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.targets.forward import linear


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """The numbers of rows that kernels were timed with, in a home of its own."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    timed: list[int] = []
    really = linear._quick_seconds

    def quick_seconds(trials: Any, rows: int, *others: Any) -> Any:
        timed.append(rows)
        return really(trials, rows, *others)

    monkeypatch.setattr(linear, "_quick_seconds", quick_seconds)
    return timed
