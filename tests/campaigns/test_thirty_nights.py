"""A month of nights on one home, and what holds after each of them.

- Every conversation is used once: a night finds exactly those that no drafter in the champion's line has used; no line
  uses one twice, trains on what it is judged on, or has what never arrived.
- Every night ends in one sentence, the same in the history, in MLflow and, where it ran there, in Prefect.
- The champion is never slower in truth than the one before by more than the gate lets through, nor at the end than the
  first; a person's move of the alias counts apart.
- `gc` bounds the disk; `doctor` finds home and promotion log whole.

DRAFTSMITH_SOAK_SEED chooses other traffic and other moments of death, DRAFTSMITH_SOAK_NIGHTS fewer nights.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from forked import SEED, recorded
from simulated_nights import PLAN, month

from components.promotion import MAX_SLOWDOWN

NIGHTS = int(os.environ.get("DRAFTSMITH_SOAK_NIGHTS", "30"))


def check(found: dict[str, Any]) -> None:
    assert found["faults"] == []
    decided = found["promoted"] + found["refused"]
    assert found["promoted"] and decided >= found["nights"] / 3  # a month in which nothing is decided shows nothing
    first, last = found["true_speed"]
    assert last >= first * (1.0 - MAX_SLOWDOWN)
    sizes = found["mib_after_gc"]
    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2 + 1])  # `gc` bounds it


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_thirty_nights(tmp_path: Path) -> None:
    found = recorded("thirty-nights", lambda: month(tmp_path, PLAN[:NIGHTS], SEED))
    check(found)
    assert found["refused"] and found["killed"]
