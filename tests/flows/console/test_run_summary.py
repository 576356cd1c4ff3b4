"""The summary of a run: what it made, what could not be logged, and what to try next."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from toy_garden import GARDEN, PACKAGES

from components.contract import DepthPolicy, Release
from flows.console.run_summary import next_commands, print_run_summary
from flows.execution.local_run import RunOutcome
from flows.planning.plan import RunOptions, plan_run


def printed(outcome: RunOutcome) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_run_summary(outcome, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_a_run_says_its_time_and_what_was_not_logged(file: Path, home: Path) -> None:
    assert file.read_text() == GARDEN.text
    plan, _ = plan_run("garden", {}, RunOptions(file=file, device="cpu", packages=PACKAGES))
    text = printed(RunOutcome(plan, {}, 75.0, problems=("MLflow is away",)))
    assert text.startswith("garden: done in 1 min 15 s, 0 of 8 steps reused\n") and "MLflow is away" in text
    quiet = printed(RunOutcome(plan, {}, 2.0, nothing_new="no new rows"))
    assert quiet == "garden: nothing new, ended after 2.0 s: no new rows\n"


def test_a_refused_release_is_measured_again_first() -> None:
    release = Release("r" * 64, Path("r"))
    refused = DepthPolicy("p" * 64, Path("p"), {"gate_passed": False})
    assert next_commands(refused, release)[0].startswith(f"draftsmith remeasure {'r' * 12}")
    passed = DepthPolicy("p" * 64, Path("p"), {"gate_passed": True})
    assert next_commands(passed, release)[0].startswith("draftsmith generate")
