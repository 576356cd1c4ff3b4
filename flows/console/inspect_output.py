"""`draftsmith show KEY`: what an artifact is, how it came to be, what it was made from and where it lies.

`draftsmith show NAME`: a registered model, its versions with aliases and evidence, and who moved what, and why.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.contract import UserError
from components.data.formats.chats import dropped_examples
from components.text import shorten
from flows.console.progress import duration
from flows.console.query_output import print_answer
from storage import journal
from storage.artifacts.store import Store
from storage.history.records import PromotionRow
from storage.registry.registry import changed_facts, notice_moves, versions_of

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
        say(f"  with {name}", shorten(value, 200))
    for name, value in record.get("inputs", {}).items():
        for input_key in value if isinstance(value, list) else [value]:
            say(f"  in {name}", f"{input_key[:12]}  {_what(store, input_key)}")
    for name, value in content["info"].items():
        say(f"  {name}", shorten(value, 200))
    files = content["files"]
    if "dropped.parquet" in files and presence.artifact is not None:
        for row in dropped_examples(store.path_of(key)):
            place = f"{row['source']} {row['where']}: " if row["where"] else ""
            say("dropped, such as", shorten(f"{row['reason']}: {place}{row['excerpt']}", 200))
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


VERSIONS = ("version", "aliases", "speedup", "95 %", "depth", "verdict", "gate", "release")
LOG = ("when (UTC)", "alias", "what", "from", "to", "who", "why")


def is_model(home: Path, name: str) -> bool:
    """Whether the promotion log knows a registered model of this name."""
    return any(row.name == name for row in journal.promotions(home))


def print_model(home: Path, name: str, console: Console) -> None:
    """The versions of a model and its promotion log; what was moved by hand in MLflow is noticed first."""
    notice_moves(home)
    versions = [_version(*version) for version in versions_of(home, name)]
    console.print(Text(name, style="bold"))
    print_answer(console, VERSIONS, versions)
    console.print()
    print_answer(console, LOG, [_move(row) for row in journal.promotions(home) if row.name == name])
    if changed := changed_facts(home, name):
        raise UserError("\n".join(changed))
    if damaged := journal.damaged_promotions(home):
        raise UserError(
            f"{journal.promotions_file(home)}: {len(damaged)} lines cannot be read, and are left out above; "
            "`draftsmith doctor --repair` sets them aside, and takes them from the history"
        )


def _version(number: int, aliases: list[str], tags: dict[str, str]) -> list[str]:
    facts = {fact: tags.get(f"draftsmith.{fact}", "") for fact in ("speedup_meas", "meas_lo", "meas_hi", "depth_k")}
    interval = f"[{_short(facts['meas_lo'])}, {_short(facts['meas_hi'])}]" if facts["meas_lo"] else ""
    cells = [str(number), ", ".join(aliases), _short(facts["speedup_meas"]), interval, facts["depth_k"]]
    gate = tags.get("gate.answer") or tags.get("gate.status", "")
    return [*cells, tags.get("draftsmith.verdict", ""), gate, tags.get("draftsmith.key", "")[:12]]


def _move(row: PromotionRow) -> list[str]:
    places = ["" if version is None else str(version) for version in (row.from_version, row.to_version)]
    return [f"{row.promoted_at:%Y-%m-%d %H:%M:%S}", row.alias, row.action, *places, row.who, row.why]


def _short(number: str) -> str:
    return f"{float(number):.2f}" if number else ""
