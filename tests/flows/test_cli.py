"""The command line: what it prints, its exit codes, and no traceback for users."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_garden import GARDEN, PACKAGES

from flows import cli
from flows.commands.terminal import echo, echo_error
from flows.console.progress import Display, duration
from flows.execution.engine import Engine, run_plan
from flows.planning.plan import RunOptions, plan_run
from storage.artifacts.store import Store

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def file(pipelines: Callable[[str], Path]) -> Path:
    return pipelines(GARDEN)


def grow(file: Path, **params: object) -> None:
    plan, store = plan_run("garden", params, RunOptions(file=file, device="cpu", packages=PACKAGES))
    Engine(store, plan, num_threads=1, preload=()).run()


def test_check_says_what_it_has_read(file: Path, draftsmith: Cli) -> None:
    assert draftsmith("check", "-f", file) == (0, "pipelines.yaml is right: garden (8 steps)\n", "")


def test_plan_prints_every_step_with_its_reason(file: Path, draftsmith: Cli) -> None:
    grow(file)
    code, out, err = draftsmith("plan", "garden", "-f", file, "-p", "steps=7")
    assert (code, err) == (0, "")
    assert "setting num_steps 6 -> 7" in out
    assert out.splitlines()[-1] == "8 steps: 1 reused, 7 to run on cpu"
    code, out, _ = draftsmith("plan", "garden", "-f", file, "--mermaid")
    assert (code, out.splitlines()[0]) == (0, "flowchart LR")


def test_show_tells_where_an_artifact_comes_from(file: Path, draftsmith: Cli, store: Store) -> None:
    grow(file)
    key = next(key for key in sorted(store.keys()) if store.record_of(key)["kind"] == "Page")
    code, out, _ = draftsmith("show", key[:10])
    assert code == 0
    for said in (
        key,
        "toys.judge_all as step page of garden",
        "whole",
        "Measurements of step judged[moss]",
        "index.html",
    ):
        assert said in out, said
    code, out, _ = draftsmith("show", key[:10], "--json")
    assert json.loads(out)["key"] == key


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rnu"], "draftsmith: No such command 'rnu'. Did you mean 'run'?"),
        (["run"], "draftsmith: Missing argument 'pipeline'."),
        (
            ["plan", "garden", "--forse", "x"],
            "draftsmith: No such option: --forse (Possible options: --force, --from, --seed)",
        ),
        (["show", "feed"], "no artifact in {home}/store has a key that starts with 'feed'"),
        (["generate", "def"], "generate: no drafter has been chosen yet; `draftsmith run quickstart` makes one"),
        (["plan", "gardne", "-f", "{file}"], "pipelines.yaml: no pipeline 'gardne' (did you mean 'garden'?)"),
    ],
)
def test_a_mistyped_command_is_told_in_one_line(
    given: list[str], said: str, file: Path, home: Path, draftsmith: Cli
) -> None:
    places = {"home": str(home), "file": str(file)}
    code, out, err = draftsmith(*(word.format(**places) for word in given))
    assert (code, out, err) == (2, "", said.format(**places) + "\n")


def test_only_commands_that_work_are_listed(draftsmith: Cli) -> None:
    code, out, _ = draftsmith("--help")
    listed = [
        line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.startswith("  ") and line[2] != " "
    ]
    assert code == 0
    making, asking = (
        ["check", "plan", "run", "remeasure", "validate"],
        ["show", "query", "compact", "compare", "trend", "generate", "choose-depth"],
    )
    assert listed == [*making, *asking, "promote", "rollback", "resync", "up", "down", "status", "doctor", "deploy"]


def test_a_failure_of_ours_names_its_log_and_hides_its_traceback(
    draftsmith: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Store, prefix: str) -> str:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(Store, "resolve", broken)
    code, out, err = draftsmith("show", "ab")
    first, second = err.splitlines()
    assert (code, out, first) == (1, "", "failed: ZeroDivisionError: by zero")
    log = Path(second.removeprefix("its traceback: "))
    assert "Traceback" in log.read_text()
    assert "Traceback" in draftsmith("--debug", "show", "ab")[2]


def test_a_run_without_a_terminal_prints_plain_lines(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    from rich.console import Console

    monkeypatch.setattr("flows.console.progress.SECONDS_BETWEEN_LINES", 0.05)
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


def test_run_plan_is_the_engine_in_one_call(file: Path, home: Path) -> None:
    plan, store = plan_run("garden", {}, RunOptions(file=file, device="cpu", packages=PACKAGES, to_step="corpus"))
    assert list(run_plan(plan, store)) == ["corpus"]


class _WithACallback:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)  # what a Ctrl-C raises here is ignored by Python


def test_a_ctrl_c_that_arrives_where_python_ignores_it_stops_the_command_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(**_: object) -> None:
        _WithACallback()
        threading.Event().wait(600)

    monkeypatch.setattr(cli, "app", work)
    assert cli.main(["run"]) == 130
    assert "interrupted" in capsys.readouterr().err


class _InterruptedOnce(io.StringIO):
    """A terminal whose user presses Ctrl-C as soon as a line is seen."""

    pressed = False

    def flush(self) -> None:
        super().flush()
        if not self.pressed and self.getvalue():
            self.pressed = True
            raise KeyboardInterrupt


@pytest.mark.parametrize(("tell", "stream"), [(echo, "stdout"), (echo_error, "stderr")])
def test_a_line_that_ctrl_c_interrupts_is_said_once_and_as_it_is(
    tell: Callable[[str], None], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = _InterruptedOnce()
    monkeypatch.setattr(sys, stream, screen)
    with pytest.raises(KeyboardInterrupt):
        tell("Ctrl-C stops everything :star: [bold]")
    tell("stopped")
    assert screen.getvalue() == "Ctrl-C stops everything :star: [bold]\nstopped\n"
