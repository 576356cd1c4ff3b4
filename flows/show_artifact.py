"""`draftsmith show KEY`: what an artifact is, how it came to be, what it was made from and where it lies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.display import duration
from flows.problems import one_line
from storage.artifacts import Store

MAX_FILES = 12


def print_artifact(store: Store, key: str, console: Console) -> None:
    """One artifact as a table of facts."""
    content = store.record_of(key)
    record: dict[str, Any] = content["record"]
    presence = store.verify_local(key)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def say(name: str, value: object) -> None:
        table.add_row(name, Text(str(value)))

    say("kind", content["kind"])
    say("key", key)
    say("path", store.path_of(key))
    if "sample.html" in content["files"]:
        say("to look at", store.path_of(key) / "sample.html")
    elsewhere = presence.fault == "absent"  # its record came from the shared store
    state = "in the shared store, not on this machine" if elsewhere else f"BROKEN: {presence.fault}"
    say("state", "whole" if presence.artifact is not None else state)
    say("made by", f"{record.get('uses', '?')} as step {record.get('step', '?')} of {record.get('pipeline', '?')}")
    when = datetime.fromtimestamp(content["finished_at"], UTC).isoformat(" ", "seconds")
    say("when", f"{when}, in {duration(float(record.get('seconds', 0.0)))}, peak {record.get('peak_rss_mib', 0):g} MiB")
    sessions = store.sessions(key)
    for session in sessions if len(sessions) > 1 else []:
        at = datetime.fromtimestamp(session.finished_at, UTC).isoformat(" ", "seconds")
        location = "the newest, above" if session.is_newest else str(session.path)
        say("measured" if session.is_newest else "", f"{at}  {location}")
    for name, value in record.get("settings", {}).items():
        say(f"  with {name}", one_line(value, 200))
    for name, value in record.get("inputs", {}).items():
        for input_key in value if isinstance(value, list) else [value]:
            say(f"  in {name}", f"{input_key[:12]}  {_what(store, input_key)}")
    for name, value in content["info"].items():
        say(f"  {name}", one_line(value, 200))
    files = content["files"]
    if "dropped.parquet" in files and presence.artifact is not None:
        from components.data.chats import dropped_examples

        for row in dropped_examples(store.path_of(key)):
            place = f"{row['source']} {row['where']}: " if row["where"] else ""
            say("dropped, such as", one_line(f"{row['reason']}: {place}{row['excerpt']}", 200))
    for name, facts in list(files.items())[:MAX_FILES]:
        say("file" if name == next(iter(files)) else "", f"{name}  {facts['size']:,} bytes")
    if len(files) > MAX_FILES:
        say("", f"and {len(files) - MAX_FILES} more")
    console.print(table)


def _what(store: Store, key: str) -> str:
    try:
        content = store.record_of(key)
    except (OSError, ValueError):
        return "(not in the store any more)"
    return f"{content['kind']} of step {content['record'].get('step', '?')}"
