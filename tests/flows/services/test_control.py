"""What `status` and the links say of a home where nothing runs, and of a state that a supervisor left."""

from __future__ import annotations

from pathlib import Path

from components.files import locked
from flows.services.client import pid_file
from flows.services.control import newest_report, states, stop
from flows.services.supervisor import state_file


def test_where_nothing_runs_there_is_no_part_and_nothing_to_stop(tmp_path: Path) -> None:
    assert states(tmp_path) == [] and not stop(tmp_path)


def test_the_state_counts_only_while_its_supervisor_lives(tmp_path: Path) -> None:
    state_file(tmp_path).parent.mkdir(parents=True)
    facts = '{"pid": 7, "healthy": true, "restarts": 1, "last_end": "", "health_url": ""}'
    state_file(tmp_path).write_text(f'{{"prefect": {facts}}}')
    assert states(tmp_path) == []
    with locked(pid_file(tmp_path)):
        (part,) = states(tmp_path)
    assert (part.name, part.pid, part.healthy, part.restarts) == ("prefect", 7, True, 1)


def test_the_newest_report_is_linked(tmp_path: Path) -> None:
    assert newest_report(tmp_path) == "none yet: draftsmith run quickstart"
    page = tmp_path / "store" / "k" / "index.html"
    page.parent.mkdir(parents=True)
    page.touch()
    assert newest_report(tmp_path) == page.as_uri()
