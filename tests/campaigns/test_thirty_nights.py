"""A month of nights on one home: each conversation is used once, each night explained, the champion never worse.

DRAFTSMITH_SOAK_SEED chooses other traffic and other moments of death, DRAFTSMITH_SOAK_NIGHTS fewer nights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked import SEED, recorded
from simulated_nights import PLAN, month

NIGHTS = int(os.environ.get("DRAFTSMITH_SOAK_NIGHTS", "30"))


def check(found: dict[str, Any]) -> None:
    assert found["faults"] == []
    decided = found["promoted"] + found["refused"]
    assert found["promoted"] and decided >= found["nights"] / 3  # a month in which nothing is decided shows nothing
    sizes = found["mib_after_gc"]
    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2 + 1])  # `gc` bounds it


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_thirty_nights(tmp_path: Path) -> None:
    found = recorded("thirty-nights", lambda: month(tmp_path, PLAN[:NIGHTS], SEED))
    check(found)
    assert found["refused"]
