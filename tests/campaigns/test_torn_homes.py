"""Torn and flipped bytes in every kind of file of a home are noticed, named, set aside, and what was in them is back.

After any damage every number that a query shows is the one it was, or the command names what is damaged; after `doctor
--repair`, a run (and `resync` for MLflow's database) the home is whole, with the answers, files and versions of before.

What cannot be known, and why that is right:
- A file of MLflow's (database or files) has no digest of its own. What the registry decides by is held against what
  was sealed, and a database that SQLite cannot read is named; a flipped letter in what is only looked at there is not.
- `verified`, `step history`, locks, logs and what a supervisor has left hold no result: what is lost there is made
  again without a word.
- A password is what its file says.
- A journal or a promotion log of which nothing was ever in the history (a run that is still going on, in a home whose
  history was deleted too) leaves no trace; as long as the history knows it, it is named and made anew.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torn_homes as homes
from forked import SEED, recorded

CASES = int(os.environ.get("DRAFTSMITH_SOAK_TORN_HOMES", "480"))


def campaign(folder: Path, number: int, seed: int) -> dict[str, Any]:
    """So many cases, one kind of file after the other; every damage to every kind within len(KINDS) * len(HOWS)."""
    base = homes.make_base(folder)
    unknown, missing = homes.unknown_files(base.home)
    assert not unknown and not missing, f"files of no known kind: {unknown}; kinds without a file: {missing}"
    kinds, outcomes = Counter[str](), dict[str, Counter[str]]()
    faults = []
    for one in range(number):
        case = homes.run_case(base, folder, one, seed)
        kinds[case.damage.kind] += 1
        outcomes.setdefault(case.damage.kind, Counter())[homes.outcome(case)] += 1
        faults += [f"case {one}, {case.damage}: {fault}" for fault in case.faults]
    return {
        "cases": number,
        "kinds": dict(kinds),
        "outcomes": {kind: dict(found) for kind, found in outcomes.items()},
        "damages": list(homes.HOWS),
        "faults": faults,
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> homes.Base:
    return homes.make_base(tmp_path_factory.mktemp("torn"))


def test_a_home_holds_no_file_of_a_kind_that_the_campaign_does_not_know(base: homes.Base) -> None:
    assert homes.unknown_files(base.home) == ([], [])


SLICE = {10: ("run journal", "flipped", "named"), 11: ("verified", "flipped unseen", "no effect")}
"""Two cases of the campaign with seed 0: what is damaged, how, and what comes of it."""


def test_a_slice_of_the_campaign_meets_no_fault(base: homes.Base, tmp_path: Path) -> None:
    cases = [homes.run_case(base, tmp_path, number, seed=0, with_runs=False) for number in SLICE]
    assert [fault for case in cases for fault in case.faults] == []
    assert {case.number: (case.damage.kind, case.damage.how, homes.outcome(case)) for case in cases} == SLICE


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_every_damage_to_every_kind_of_file_is_met(tmp_path: Path) -> None:
    found = recorded("torn-homes", lambda: campaign(tmp_path, CASES, SEED))
    assert found["faults"] == []
    assert len(found["kinds"]) == min(CASES, len(homes.KINDS))
    assert all("named" in found["outcomes"][kind] for kind in homes.MUST_BE_FOUND if len(homes.KINDS) * 2 <= CASES)
