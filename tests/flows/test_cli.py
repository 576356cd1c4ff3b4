"""The command line: what it prints, its exit codes, and no traceback for users."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from toy_garden import Cli

from flows import cli
from storage.artifacts.store import Store


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rnu"], "draftsmith: No such command 'rnu'. Did you mean 'run'?"),
        (["run"], "draftsmith: Missing argument 'pipeline'."),
        (
            ["plan", "garden", "--forse", "x"],
            "draftsmith: No such option: --forse (Possible options: --force, --from, --seed)",
        ),
        (["show", "feed"], "no artifact in {home}/store has a key that starts with 'feed' (docs: operate)"),
        (
            ["generate", "def"],
            "generate: no drafter has been chosen yet; `draftsmith run quickstart` makes one (docs: operate)",
        ),
        (
            ["plan", "gardne", "-f", "{file}"],
            "pipelines.yaml: no pipeline 'gardne' (did you mean 'garden'?) (docs: first-pipeline)",
        ),
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
        ["demo", "init", "check", "explain", "plan", "rehearse", "run", "night", "remeasure", "validate", "convert"],
        ["show", "query", "diff", "lineage", "history", "compact", "compare", "trend", "generate", "choose-depth"],
    )
    keeping = ["promote", "rollback", "resync", "dashboard", "delete", "rename", "du", "gc", "backup", "restore"]
    assert listed == [*making, *asking, *keeping, "up", "down", "status", "doctor", "deploy"]


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
