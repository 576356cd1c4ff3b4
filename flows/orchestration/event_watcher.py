"""PREFECT: tells the server about new files and moved registry aliases, which are what `triggers:` wait for.

    python -m flows.orchestration.event_watcher

One loop, one child of `draftsmith up`. A file counts once it has stopped growing: the same size and time at two looks
in a row. Events are recorded after the server has accepted them, so an event is sent twice rather than lost; its id
is made from its content, so that the server recognises the second one. Files that exist at the first look at a pattern
cause no event. Aliases moved by hand in MLflow are noticed, logged and sent like any other move.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from components.contract import UserError
from components.files import write_whole
from components.outside_json import JsonObject
from flows.orchestration.prefect_server import prepare
from flows.spec.schema import load_spec, pipelines_file
from storage import journal
from storage.artifacts.store import default_home
from storage.registry.registry import notice_moves
from storage.registry.tracking import has_database

SECONDS_BETWEEN_LOOKS = 5.0
FILE_EVENT = "draftsmith.file.new"
MOVE_EVENT = "draftsmith.registry.moved"
MOST_PATHS_TOLD = 100

Stamp = list[int]  # [size in bytes, time of the last change in ns]


class WatchState(TypedDict, total=False):
    """What the server has accepted. files: pattern -> path -> stamp; moves: ids in the promotion log.

    A part that is missing has never been looked at.
    """

    files: dict[str, dict[str, Stamp]]
    moves: list[str]


@dataclass(frozen=True)
class PendingEvent:
    """An event that is due. body: as Prefect's API takes it. stamps, move: what `acknowledge` records of it."""

    body: JsonObject
    pattern: str = ""
    stamps: Mapping[str, Stamp] = field(default_factory=dict)
    move: str = ""


def pattern_of(file: Path, pattern: str) -> str:
    """The pattern of a file trigger, made absolute; a relative one starts at the folder of the pipelines file."""
    return pattern if os.path.isabs(pattern) else os.path.join(glob.escape(str(file.resolve().parent)), pattern)


def file_resource(pattern: str) -> str:
    """The resource that events about files of this (absolute) pattern name."""
    return f"draftsmith.files.{hashlib.sha256(pattern.encode()).hexdigest()[:16]}"


def move_resource(name: str, alias: str) -> str:
    """The resource that events about this alias name."""
    return f"draftsmith.registry.{name}.{alias}"


class Watcher:
    """Finds new events. `state` records what the server has accepted; it is kept in home/watch.json."""

    def __init__(self, file: Path, home: Path) -> None:
        self.file, self.home, self.place = file, home, home / "watch.json"
        self.seen_before: dict[str, dict[str, Stamp]] = {}  # by pattern, at the last look
        try:
            self.state: WatchState = json.loads(self.place.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            self.state = {}

    def pending_events(self) -> list[PendingEvent]:
        """Events that are due. They are due again at the next look unless `acknowledge` is called."""
        return [*self._new_files(), *self._moves()]

    def acknowledge(self, events: list[PendingEvent]) -> None:
        """These events have reached the server."""
        for event in events:
            if event.move:
                self.state["moves"].append(event.move)
            else:
                self.state["files"][event.pattern] |= event.stamps
        self._save()

    def _patterns(self) -> set[str]:
        """The patterns of all file triggers."""
        spec = load_spec(self.file)
        return {
            pattern_of(self.file, trigger.file)
            for pipeline in spec.pipelines.values()
            for trigger in pipeline.triggers
            if trigger.file is not None
        }

    def _new_files(self) -> Iterator[PendingEvent]:
        known_files = self.state.setdefault("files", {})
        patterns = self._patterns()
        for pattern in sorted(patterns):
            stamps = _stamps(pattern)
            if pattern not in known_files:  # the first look: what is there is no news
                known_files[pattern] = stamps
                self._save()
                continue
            before = self.seen_before.get(pattern, {})
            self.seen_before[pattern] = stamps
            new = {path: stamp for path, stamp in stamps.items() if known_files[pattern].get(path) != stamp}
            still = {path: stamp for path, stamp in new.items() if before.get(path) == stamp}
            if still:
                paths = sorted(still)
                payload = {"pattern": pattern, "paths": paths[:MOST_PATHS_TOLD], "num_files": len(paths)}
                body = _event(FILE_EVENT, file_resource(pattern), pattern, payload, sorted(still.items()))
                yield PendingEvent(body, pattern=pattern, stamps=still)
        for removed in set(known_files) - patterns:
            del known_files[removed]

    def _moves(self) -> Iterator[PendingEvent]:
        first = "moves" not in self.state
        if has_database(self.home):
            notice_moves(self.home)
        rows = journal.promotions(self.home)
        if first:
            self.state["moves"] = [row.promotion_id for row in rows]
            self._save()
            return
        for row in rows:
            if row.alias and row.promotion_id not in self.state["moves"]:  # newer evidence moves no alias
                payload = {
                    "promotion_id": row.promotion_id,
                    "name": row.name,
                    "alias": row.alias,
                    "from_version": row.from_version,
                    "to_version": row.to_version,
                    "action": row.action,
                    "who": row.who,
                }
                what = f"{row.name}@{row.alias}"
                body = _event(MOVE_EVENT, move_resource(row.name, row.alias), what, payload, row.promotion_id)
                yield PendingEvent(body, move=row.promotion_id)

    def _save(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        write_whole(self.place, json.dumps(self.state))


def send(events: list[PendingEvent]) -> None:
    """Send events to Prefect's server; returns when it has accepted them all. Raises its client's errors."""
    from prefect.client.orchestration import get_client  # when `main` has prepared the settings that it reads

    with get_client(sync_client=True) as client:
        client.request("POST", "/events", json=[event.body for event in events]).raise_for_status()


def watch(file: Path, home: Path, stop: threading.Event) -> None:
    """Look until told to stop. A fault is one line, and no more until another one comes or it is over."""
    watcher, last = Watcher(file, home), ""
    while not stop.wait(SECONDS_BETWEEN_LOOKS):
        try:
            if events := watcher.pending_events():
                send(events)
                watcher.acknowledge(events)
            fault = ""
        except UserError as error:
            fault = str(error)
        except Exception as error:  # the server or MLflow is away; the supervisor brings it back, we look again
            fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if fault != last:
            sys.stderr.write(f"watch: {fault or 'goes on'}\n")
            sys.stderr.flush()
            last = fault


def _stamps(pattern: str) -> dict[str, Stamp]:
    """Files that match, with size and time."""
    stamps: dict[str, Stamp] = {}
    for path in glob.iglob(pattern, recursive=True):
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            continue  # gone since it was listed
        if os.path.isfile(path):
            stamps[path] = [facts.st_size, facts.st_mtime_ns]
    return stamps


def _event(event: str, resource: str, name: str, payload: JsonObject, unique: object) -> JsonObject:
    """An event as Prefect's API takes it. unique: what makes it this event and no other."""
    return {
        "event": event,
        "occurred": datetime.now(UTC).isoformat(),
        "resource": {"prefect.resource.id": resource, "prefect.resource.name": name},
        "related": [],
        "payload": payload,
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{event} {resource} {json.dumps(unique)}")),
    }


def main() -> None:
    """Watch the file of $DRAFTSMITH_PIPELINES on this home until a signal comes."""
    stop = threading.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        # in a thread: this one may hold the event's lock just where the signal interrupts it
        signal.signal(ending, lambda *_: threading.Thread(target=stop.set, daemon=True).start())
    home = default_home()
    prepare(home)
    watch(pipelines_file(), home, stop)


if __name__ == "__main__":
    main()
