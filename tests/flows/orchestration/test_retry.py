"""A night that cannot be planned says why everywhere, also to those who are to hear of it; one that was disturbed is
measured again later the same night."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect_server import environment

from flows.spec.schema import RetrySpec
from storage.history.query import query

HERE = Path(__file__).resolve().parents[1]


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("zone", "begun", "now", "expected"),
    [
        ("UTC", at(5, 2), at(5, 2, 40), at(5, 3, 25)),
        ("UTC", at(5, 2), at(5, 5, 15), at(5, 6)),
        ("UTC", at(5, 2), at(5, 5, 16), None),
        ("UTC", at(4, 22), at(4, 23, 30), at(5, 0, 15)),
        ("UTC", at(4, 22), at(5, 7), None),
        ("Asia/Tokyo", at(4, 19), at(4, 20, 10), at(4, 20, 55)),
        ("Asia/Tokyo", at(4, 19), at(4, 20, 20), None),
    ],
)
def test_the_next_attempt_is_before_the_morning_of_the_night_that_the_run_began_in(
    zone: str, begun: datetime, now: datetime, expected: datetime | None
) -> None:
    from flows.orchestration.retry import next_attempt

    assert next_attempt(RetrySpec(until="06:00", timezone=zone), now, begun) == expected


def test_nights_end_in_one_sentence_and_a_disturbed_one_is_scheduled_again(server: str, tmp_path: Path) -> None:
    home, file, began = tmp_path / "home", tmp_path / "pipelines.yaml", datetime.now(UTC)
    until = f"{began + timedelta(hours=3):%H:%M}"
    command = [sys.executable, str(HERE / "night_round_trip.py"), str(file), str(home), until]
    pages = f"{server.removesuffix('/api')}/v2"
    env = environment(home, PREFECT_API_URL=server, PREFECT_UI_URL=pages, PYTHONPATH=str(HERE.parents[1]))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])

    state, reason, failed_run = said["lost"]
    assert state == "Failed" and "no registered model 'oak'" in reason and "`draftsmith run quickstart`" in reason
    rows = query("SELECT pipeline, status, how, reason FROM v_run ORDER BY started_at", home)[1]
    assert rows[0] == ("lost", "failed", "prefect", reason)

    state, message, _ = said["noisy"]
    ((parameters, when),) = said["again"]
    assert parameters["force"] == ["timed"] and parameters["rows"] == 4
    due = datetime.fromisoformat(when)
    assert timedelta(minutes=20) <= due - began <= timedelta(minutes=23)
    told = "the measurement was disturbed: other work ran meanwhile; "
    told += f"it is measured again at {due:%H:%M} UTC, as `retry` of the pipeline says"
    assert message.endswith(told)
    assert (state, rows[1]) == ("Completed", ("noisy", "completed", "prefect", told))
    state, unread, _ = said["unreadable"]
    assert rows[2] == rows[0] and said["told of a command"] == reason, "a run by hand that cannot be planned"
    assert (state, rows[3]) == ("Failed", ("noisy", "failed", "prefect", unread)) and "pipelines.yaml:" in unread

    assert "no block 'custom-webhook/ops' on the server" in said["no block"] and said["deployed again"] == []
    assert said["not told"] == []
    where = "\n\nthe report: https://draft.example.com/reports/k1/"
    by_the_run = {"draftsmith: lost failed": f"it died{where}", "draftsmith: lost drift": f"acceptance fell{where}"}
    assert by_the_run.items() <= said["told by the run"].items()
    heard = said["told"]
    assert heard["draftsmith: lost drift"] == f"acceptance fell{where}"
    assert "draftsmith: lost promoted" not in {*heard, *said["told by the run"]}  # nobody asked for it
    assert heard["draftsmith: lost failed"].startswith(reason)
    assert heard["draftsmith: lost failed"].endswith(f"the run: {failed_run}")
    assert heard["draftsmith: lost stale"].startswith("lost: no verdict for 0.0002 days")
    assert heard["draftsmith: lost stale"].endswith(f"the pipeline: {said['page']}")
