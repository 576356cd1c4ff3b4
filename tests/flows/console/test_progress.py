"""Progress of a run: plain lines where there is no terminal, durations as people say them."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_garden import PACKAGES

from flows.console.progress import Display, duration
from flows.execution.engine import Engine
from flows.planning.plan import RunOptions, plan_run


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
