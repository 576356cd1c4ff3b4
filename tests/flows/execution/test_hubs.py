"""A pipeline reaches hubs where it asks for it and the operator allows it; a no of his is the last word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pipeline_builder import pipeline, step
from toy_garden import Cli

from flows.execution.hubs import OFFLINE, VARIABLE, hubs_fault
from storage.history.query import query

ASKS = pipeline("far", keys={"online": True}, soil=step("toys.plant"))


@pytest.mark.parametrize(
    ("allowed", "offline", "declared", "asked", "fault"),
    [
        ("", "", False, False, ""),
        ("none", "1", False, False, ""),  # who does not ask is not refused
        ("", "1", False, True, ""),
        ("far", "", True, False, ""),
        ("near, far", "0", True, False, ""),
        ("all", "", True, False, ""),
        ("", "", True, False, "does not allow it: start `draftsmith up` (or the worker) with DRAFTSMITH_ONLINE=far,"),
        ("fare", "", True, False, "(did you mean 'fare'?): start `draftsmith up` (or the worker) with"),
        ("far", "1", True, False, "$HF_HUB_OFFLINE is set where it runs"),
        ("all,none", "", True, False, "the operator denies it"),
        ("none", "", False, True, "--online: the operator denies it"),
        ("far,none", "", True, True, "--online: the operator denies it"),
    ],
)  # fmt: skip
def test_both_must_want_it_and_a_no_wins(
    allowed: str, offline: str, declared: bool, asked: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, allowed)
    monkeypatch.setenv(OFFLINE, offline)
    told = hubs_fault("far", declared=declared, asked=asked)
    assert fault in told and bool(fault) == bool(told) and "\n" not in told


def test_a_run_that_may_not_is_refused_before_its_first_step_and_recorded(
    draftsmith: Cli, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv(OFFLINE, "")
    file = tmp_path / "pipelines.yaml"
    file.write_text(ASKS.text)
    home.mkdir()
    run = ("run", "far", "--direct", "--file", file)
    code, _, err = draftsmith(*run)
    assert code == 2 and "pipeline 'far' says `online: true`, and the operator does not allow it" in err
    ((status, reason),) = query("SELECT status, reason FROM v_run", home)[1]
    assert status == "failed" and err.splitlines() == [f"{reason} (docs: security)"]
    assert draftsmith("plan", "far", "--file", file)[0] == 0  # asks nobody
    monkeypatch.setenv(VARIABLE, "far")
    assert draftsmith(*run)[0] == 0
    assert os.environ[OFFLINE] == "0"  # what the processes of its steps get
