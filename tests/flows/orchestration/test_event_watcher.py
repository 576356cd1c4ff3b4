"""The watcher tells of a new file once, when it has stopped growing, and of every move of an alias."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipeline_builder import pipeline, step

from flows.orchestration.event_watcher import (
    FILE_EVENT,
    MOVE_EVENT,
    PendingEvent,
    Watcher,
    file_resource,
    move_resource,
    pattern_of,
)
from storage import journal
from storage.history.records import PromotionRow, now

FOLLOWER = pipeline("follower", keys={"triggers": [{"file": "in/*.txt"}]}, soil=step("toys.plant"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "with [brackets]"
    (folder / "in").mkdir(parents=True)
    (folder / "pipelines.yaml").write_text(FOLLOWER.text)
    (folder / "in" / "old.txt").write_text("was here before")
    return folder


def paths(events: list[PendingEvent]) -> list[str]:
    return [Path(path).name for event in events for path in event.body["payload"]["paths"]]


def test_a_file_is_news_once_when_it_has_stopped_growing_and_a_restart_forgets_nothing(place: Path, home: Path) -> None:
    watcher = Watcher(place / "pipelines.yaml", home)
    assert watcher.pending_events() == [], "what was there before is no news"
    new = place / "in" / "new.txt"
    new.write_text("half")
    assert watcher.pending_events() == [], "seen for the first time: it may still grow"
    new.write_text("half and the rest")
    assert watcher.pending_events() == []
    events = watcher.pending_events()
    assert [event.body["event"] for event in events] == [FILE_EVENT] and paths(events) == ["new.txt"]
    assert events[0].body["resource"]["prefect.resource.id"] == file_resource(
        pattern_of(place / "pipelines.yaml", "in/*.txt")
    )
    assert watcher.pending_events()[0].body["id"] == events[0].body["id"], (
        "the server did not take it: the same event is due again"
    )
    watcher.acknowledge(events)
    assert watcher.pending_events() == []
    (place / "in" / "late.txt").write_text("while nobody watched")
    again = Watcher(place / "pipelines.yaml", home)
    again.pending_events()
    events = again.pending_events()
    assert paths(events) == ["late.txt"]
    again.acknowledge(events)
    new.write_text("something else entirely")
    again.pending_events()
    assert paths(again.pending_events()) == ["new.txt"], "a changed file is news"


def move(home: Path, version: int) -> PromotionRow:
    row = PromotionRow(f"move-{version}", now(), "builtin", "champion", "promote", None, version, "ann", "", "{}")
    journal.log_promotion(home, row)
    return row


def test_every_later_move_in_the_promotion_log_is_told_until_it_is_taken(place: Path, home: Path) -> None:
    home.mkdir(parents=True)
    move(home, 1)
    watcher = Watcher(place / "pipelines.yaml", home)
    assert watcher.pending_events() == []
    move(home, 2)
    for _ in range(2):
        (event,) = watcher.pending_events()
        assert (event.body["event"], event.body["payload"]["to_version"]) == (MOVE_EVENT, 2)
        assert event.body["resource"]["prefect.resource.id"] == move_resource("builtin", "champion")
        json.dumps(event.body)
    watcher.acknowledge([event])
    assert Watcher(place / "pipelines.yaml", home).pending_events() == []
