"""A month of nights on one home, and what holds after each of them.

- Every conversation is used once: a night finds exactly those that no drafter in the champion's line has used; no line
  uses one twice, trains on what it is judged on, or has what never arrived. What a promoted night leaves is as many as
  it says. In nights with a planted fault, which count as seen what nobody has used, this check does find it.
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
from simulated_nights import PLAN, Month, month

from components.promotion import MAX_SLOWDOWN

NIGHTS = int(os.environ.get("DRAFTSMITH_SOAK_NIGHTS", "30"))


def lossy_nights(folder: Path, seed: int) -> list[str]:
    """What is wrong after a few nights that count conversations as seen which nobody has used: the checks find it."""
    here = Month(folder, seed, limit=4, lossy=True)
    began = here.run("first")
    assert began.code == 0, began.said
    while not here.faults and len(here.nights) < 5:
        here.night("new")
    return here.faults


def campaign(folder: Path) -> dict[str, Any]:
    """The month, and beside it the nights with the planted fault."""
    return {**month(folder / "month", PLAN[:NIGHTS], SEED), "lossy_nights": lossy_nights(folder / "lossy", SEED)}


def check(found: dict[str, Any]) -> None:
    assert found["faults"] == []
    decided = found["promoted"] + found["refused"]
    assert found["promoted"] and decided >= found["nights"] / 3  # a month in which nothing is decided shows nothing
    assert found["used_once"] >= found["conversations"] / 2, "else that each is used once is hardly tried"
    assert any("new conversations, and" in fault for fault in found["lossy_nights"])
    first, last = found["true_speed"]
    assert last >= first * (1.0 - MAX_SLOWDOWN)
    sizes = found["mib_after_gc"]
    assert max(sizes[len(sizes) // 2 :]) < 1.5 * max(sizes[: len(sizes) // 2 + 1])  # `gc` bounds it


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_thirty_nights(tmp_path: Path) -> None:
    found = recorded("thirty-nights", lambda: campaign(tmp_path))
    check(found)
    assert found["refused"] and found["killed"]
