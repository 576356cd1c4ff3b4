"""What a run prints: plain lines where there is no terminal, durations as people say them, and its summary."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from toy_garden import GARDEN, PACKAGES

from components.contract import DepthPolicy, Prompts, Release
from flows.commands.run_output import Display, duration, example_of, next_commands, print_run_summary
from flows.execution.engine import Engine
from flows.execution.local_run import RunOutcome
from flows.planning.plan import RunOptions, plan_run


def test_a_run_without_a_terminal_prints_plain_lines(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    from rich.console import Console

    monkeypatch.setattr("flows.commands.run_output.SECONDS_BETWEEN_LINES", 0.05)
    plan, store = plan_run(
        "garden", {"pause": 0.05}, RunOptions(file=file, device="cpu", packages=PACKAGES, to_step="draft[fern]")
    )
    with Display(Console(width=100), width=12) as display:
        engine = Engine(store, plan, display.on_event, num_threads=1, preload=())
        engine.run()
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "corpus        5 rows from seed"
    assert lines[1].startswith("corpus        done in ")
    assert any(
        line.startswith("draft[fern]   growing: ") and line.endswith(" left") and " of 6, " in line for line in lines
    )
    assert lines[-1].startswith("draft[fern]   done in ")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations_are_said_as_people_do(seconds: float, said: str) -> None:
    assert duration(seconds) == said


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
    assert next_commands(refused, release, "Say")[0].startswith(f"draftsmith remeasure {'r' * 12}")
    passed = DepthPolicy("p" * 64, Path("p"), {"gate_passed": True, "target_key": "f" * 64})
    commands = next_commands(passed, release, "Say")
    assert commands[0] == 'draftsmith generate "Say"'
    assert f"WHERE starts_with(target_key, '{'f' * 12}') AND workload = 'all'" in commands[1], "of this target alone"


def test_what_to_generate_is_like_the_prompts_of_the_run(file: Path, home: Path) -> None:
    plan, _ = plan_run("garden", {}, RunOptions(file=file, device="cpu", packages=PACKAGES))
    for source, start in (("chats.jsonl", "Write"), ("python-stdlib", "def ")):
        prompts = Prompts("p" * 64, Path("p"), {"source": source})
        assert example_of(RunOutcome(plan, {"prompts": prompts}, 1.0)).startswith(start)


def test_a_part_that_is_half_done_is_not_told_as_done(file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.commands.run_output.SECONDS_BETWEEN_LINES", 0.0)
    plan, _ = plan_run("garden", {}, RunOptions(file=file, device="cpu", packages=PACKAGES))
    console = Console(file=io.StringIO(), width=200)
    with Display(console) as display:
        for done, total in ((0.62, 1), (1, 1), (57.6, 120)):
            display.on_event(plan.steps[0], {"event": "progress", "done": done, "total": total, "what": "shards"})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert ["shards: 62% of 1" in lines[0], "shards: 1 of 1" in lines[1], "shards: 58 of 120" in lines[2]] == [True] * 3


def test_the_first_word_of_a_step_that_began_long_ago_is_not_kept_back(
    file: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("flows.commands.run_output.time.monotonic", lambda: now[0])
    plan, _ = plan_run("garden", {}, RunOptions(file=file, device="cpu", packages=PACKAGES))
    console = Console(file=io.StringIO(), width=200)
    with Display(console) as display:
        display.on_event(plan.steps[0], {"event": "start"})
        for moment, done in ((1.0, 0.0), (60.0, 0.0), (61.0, 1.0)):
            now[0] = moment
            display.on_event(plan.steps[0], {"event": "progress", "done": done, "total": 9, "what": "shards"})
    assert console.file.getvalue().splitlines() == [f"{plan.steps[0].name:<20}  shards: 0 of 9"]  # type: ignore[attr-defined]
