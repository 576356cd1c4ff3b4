"""What a run shows in Prefect's UI never fails the run: a fault is one line, and after the third nothing is shown."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from flows.orchestration.ui_artifacts import MOST_FAULTS, Screen, machine_limit
from flows.planning.plan import Plan
from storage.artifacts.store import Store


def test_the_limit_of_this_machine_has_a_name_that_prefect_takes() -> None:
    assert re.fullmatch(r"measuring on [A-Za-z0-9._-]+", machine_limit())


def test_after_the_third_fault_nothing_is_shown(
    plan_of: Callable[..., Plan], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(plan_of(), store)
    for _ in range(MOST_FAULTS + 2):
        screen.note("outside any run there is no logger of a run")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == MOST_FAULTS and all(line.startswith("the Prefect UI shows less of this run: ") for line in told)
