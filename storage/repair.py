"""What is damaged in a home, and how it is mended: from sealed artifacts, journals, the promotion log and the history.

Nothing is thrown away: what is not whole goes to `broken/`, where an earlier version of the history and unreadable
lines of the promotion log go too. The history is made anew from all the others; a journal or a promotion log that lacks
what the history knows is made anew from the history. What else has to be made again is made by the next run that needs
it, a database by `draftsmith resync` (MLflow's) or `draftsmith up` (Prefect's).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.contract import UserError
from storage import journal, sessions
from storage.artifact_records import BadRecord, read_checked
from storage.artifacts import Store
from storage.history import files_of, history_dir
from storage.records import PromotionRow
from storage.results import damaged_files, rebuild, rows_of
from storage.schema import all_tables
from storage.segments import reading
from storage.tracking import broken_database
from storage.whole_files import sha256_of

DATABASES = {
    "mlflow/mlflow.db": "`draftsmith resync` makes a new one from the journals, releases and promotions",
    "prefect/prefect.db": "the next `draftsmith up` makes a new one, and the journals keep what ran",
}
PASSWORD = "prefect/auth"
_FILES = (  # places where a file belongs, and a folder stops every command that comes by
    r"promotions\.jsonl|services\.(json|pid)|runs/[^/]+\.jsonl|verified/[^/]+\.json|steps/[^/]+/[^/]+\.json"
    r"|locks/[^/]+|logs/[^/]+/[^/]+\.log|mlflow/(moving\.json|[^/]+\.db|ready-[^/]+|[^/]+\.lock)|prefect/(prefect\.db|auth)"
    r"|history/([^/]+/)?(\.\w+\.lock|[^/]+\.(parquet|json|txt))"
)


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was written. name: what it is called there.

    where: "artifact", "earlier" (session of one), "folder" (where a file belongs), "journal", "promotions", "history",
    "database" or "password".
    """

    where: str
    name: str
    why: str


def damages(home: Path, store: Store) -> Iterator[Damage]:
    """Everything that is damaged; every file of every artifact is read, and nothing is changed."""
    yield from _of_places(home)
    for key in _folders(home / "store"):
        found = store.look(key, anew=True)
        if found.artifact is None and found.why != "absent":
            yield Damage("artifact", key, found.why)
    for key in _folders(home / "earlier"):
        for session in _folders(home / "earlier" / key):
            if why := _of_earlier(home / "earlier" / key / session, key):
                yield Damage("earlier", f"{key}/{session}", why)
    yield from _of_logs(home)
    of_history = list(_of_history(home))
    yield from of_history
    if not of_history:
        yield from _missed(home)
    for name in DATABASES:
        if (home / name).is_file() and (why := broken_database(home / name, whole=True)):
            yield Damage("database", name, why)
    if why := _of_password(home / PASSWORD):
        yield Damage("password", PASSWORD, why)


def repair(home: Path, store: Store) -> list[str]:
    """Mend what `damages` finds; what was done, a line each. What everything else is made anew from comes first."""
    found = list(damages(home, store))
    by_place: dict[str, list[Damage]] = {}
    for damage in found:
        by_place.setdefault(damage.where, []).append(damage)
    menders: dict[str, Callable[[Path, Store, list[Damage]], list[str]]] = {
        "folder": _mend_folders,
        "artifact": _mend_artifacts,
        "earlier": _mend_earlier,
        "promotions": _mend_promotions,
        "journal": _mend_journals,
        "history": _mend_history,
        "database": _mend_databases,
        "password": _mend_password,
    }
    said = [line for where, mend in menders.items() if where in by_place for line in mend(home, store, by_place[where])]
    if "folder" in by_place and "history" not in by_place:  # one of them may have been a log or a journal
        for damage in list(_missed(home)):
            said += menders[damage.where](home, store, [damage])
    return said


def _of_places(home: Path) -> Iterator[Damage]:
    for top, folders, _ in os.walk(home):
        inside = Path(top).relative_to(home)
        if inside.parts[:1] in (("store",), ("earlier",), ("partial",), ("broken",)):
            folders.clear()
        for name in folders:
            if re.fullmatch(_FILES, (inside / name).as_posix()):
                yield Damage("folder", (inside / name).as_posix(), "is a folder where a file belongs")


def _of_earlier(path: Path, key: str) -> str:
    """What is wrong with an earlier session of a key, or ''; of what is no evidence its record alone is kept."""
    try:
        record = read_checked(path)
    except BadRecord as error:
        return str(error)
    if record["key"] != key or sessions.place_name(record) != path.name:
        return f"its record is that of {record['key'][:12]} in session {sessions.place_name(record)}"
    for name, facts in record["files"].items() if record["kind"] in sessions.EVIDENCE else ():
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256_of(path / name) != facts["sha256"]:
            return f"{name} has changed since it was made"
    return ""


def _of_logs(home: Path) -> Iterator[Damage]:
    if not journal.promotions_file(home).is_dir():
        for line in journal.damaged_promotions(home):
            yield Damage("promotions", f"line {line} of {journal.promotions_file(home).name}", "cannot be read")
    for path in journal.journals(home):
        for line in journal.damaged_lines(path)[:1]:
            yield Damage("journal", path.stem, f"line {line} of its journal cannot be read")


def _missed(home: Path) -> Iterator[Damage]:
    """What the history knows, and the promotion log and the journals have lost."""
    if not history_dir(home).is_dir():
        return
    moves = {row["promotion_id"] for row in rows_of(home, "promotion")}
    if not journal.promotions_file(home).is_dir() and (
        gone := moves - {row.promotion_id for row in journal.promotions(home)}
    ):
        yield Damage("promotions", f"{len(gone)} entries", "are gone from the promotion log; the history has them")
    damaged = {path.stem for path in journal.journals(home) if journal.damaged_lines(path)}
    for run in rows_of(home, "run"):
        path = home / "runs" / f"{run['run_id']}.jsonl"
        if path.stem in damaged or path.is_dir():
            continue
        entries = journal.read(path) if path.is_file() else []
        end, num_steps = journal.first(entries, "end"), sum(entry["entry"] == "step" for entry in entries)
        if not entries:
            yield Damage("journal", run["run_id"], "its journal is gone; the history has the run")
        elif end is None or end["status"] != run["status"] or num_steps != run["num_executed"] + run["num_reused"]:
            yield Damage("journal", run["run_id"], "its journal ends early; the history has the whole run")


def _of_history(home: Path) -> Iterator[Damage]:
    if not history_dir(home).is_dir():
        return
    table = ""
    try:
        with reading(history_dir(home)):
            for table in all_tables():
                files_of(home, table)
            for file in damaged_files(home):
                yield Damage("history", str(file.relative_to(history_dir(home))), "is gone, torn or has changed")
    except UserError as error:
        yield Damage("history", table, str(error).partition(";")[0])


def _mend_folders(home: Path, store: Store, found: list[Damage]) -> list[str]:
    return [f"{one.name} ({one.why}) is set aside in {_aside(home, one.name)}" for one in found]


def _mend_artifacts(home: Path, store: Store, found: list[Damage]) -> list[str]:
    said = []
    for damage in found:
        with store.lock(damage.name):
            said.append(f"{damage.name[:12]} ({damage.why}) is set aside in {store.set_aside(damage.name)}")
    return said


def _mend_earlier(home: Path, store: Store, found: list[Damage]) -> list[str]:
    said = []
    for damage in found:
        with store.lock(damage.name.partition("/")[0]):
            place = _aside(home, f"earlier/{damage.name}")
        said.append(f"an earlier session of {damage.name[:12]} ({damage.why}) is set aside in {place}")
    return said


def _mend_promotions(home: Path, store: Store, found: list[Damage]) -> list[str]:
    said = []
    if journal.damaged_promotions(home):
        aside = _place(home, "promotions.jsonl")
        number = journal.set_damaged_aside(home, aside)
        said.append(f"{number} unreadable lines of the promotion log are set aside in {aside}")
    if not any(_of_history(home)):
        known = {row.promotion_id for row in journal.promotions(home)}
        rows = [PromotionRow(**row) for row in rows_of(home, "promotion") if row["promotion_id"] not in known]
        if rows:
            journal.add_promotions(home, sorted(rows, key=lambda row: row.promoted_at))
            said.append(f"{len(rows)} entries of the promotion log are taken from the history")
    return said


def _mend_journals(home: Path, store: Store, found: list[Damage]) -> list[str]:
    """Write the journals of runs anew: the entries that can be read, and for the others what the history has."""
    said = []
    is_whole = not any(_of_history(home))
    runs = {row["run_id"]: row for row in rows_of(home, "run")} if is_whole else {}
    steps = rows_of(home, "step") if is_whole else []
    infos = (
        {(row["artifact_key"], row["session"]): row["info"] for row in rows_of(home, "artifact")} if is_whole else {}
    )
    for run_id in sorted({one.name for one in found}):
        path = home / "runs" / f"{run_id}.jsonl"
        entries = journal.read(path) if path.is_file() else []
        where = f"what it was is in {_aside(home, f'runs/{path.name}')}" if path.exists() else "there was none"
        if run_id in runs:
            entries = _entries_of(runs[run_id], [row for row in steps if row["run_id"] == run_id], infos, entries)
        if journal.first(entries, "run") is not None:
            journal.write_anew(path, entries)
        how = "made anew with the history" if run_id in runs else "kept as far as it can be read"
        said.append(f"the journal of run {run_id} is {how}; {where}")
    return said


def _entries_of(
    run: dict[str, Any], steps: list[dict[str, Any]], infos: dict[tuple[str, str], str], known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of a journal by its rows in the history; those that are known stay as they are."""
    start = journal.first(known, "run") or {
        "entry": "run",
        **{name: run[name] for name in ("run_id", "pipeline", "how", "git_commit", "draftsmith_version")},
        "params": json.loads(run["params"]),
        "flow_run_id": "",
        "pipeline_digest": "",
        "may_promote": False,  # whether somebody was to be asked is not known any more
        "time": _seconds(run["started_at"]),
    }
    there = {entry["step"]: entry for entry in known if entry["entry"] == "step"}
    made = [
        there.get(row["step"])
        or {
            "entry": "step",
            **{name: row[name] for name in ("step", "uses", "kind", "status", "why", "seconds", "session")},
            "key": row["artifact_key"] or "",
            "settings": json.loads(row["settings"]),
            "inputs": json.loads(row["inputs"]),
            "info": json.loads(infos.get((row["artifact_key"], row["session"]), "{}")),
            "path": f"store/{row['artifact_key']}" if row["artifact_key"] else "",
            "time": _seconds(row["ended_at"]),
        }
        for row in sorted(steps, key=lambda row: row["ended_at"])
    ]
    last = {"entry": "end", "status": run["status"], "reason": run["reason"] or "", "time": _seconds(run["ended_at"])}
    end = journal.first(known, "end")
    return [start, *made, end if end is not None and end["status"] == run["status"] else last]


def _mend_history(home: Path, store: Store, found: list[Damage]) -> list[str]:
    kept = _place(home, "history")
    shutil.copytree(history_dir(home), kept)
    counts = rebuild(home, store)
    made = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return [f"the history is made anew ({made or 'nothing to put into it'}); what it was is in {kept}"]


def _mend_databases(home: Path, store: Store, found: list[Damage]) -> list[str]:
    said = []
    for damage in found:
        file = home / damage.name
        for beside in [*file.parent.glob(f"{file.name}-*"), *file.parent.glob("ready-*")]:
            _aside(home, beside.relative_to(home).as_posix())
        said.append(
            f"{damage.name} ({damage.why}) is set aside in {_aside(home, damage.name)}; {DATABASES[damage.name]}"
        )
    return said


def _of_password(file: Path) -> str:
    """What is wrong with the file of the servers' password, or ''."""
    if not file.is_file():
        return ""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        return "is no text"
    return "" if ":" in text and text.isprintable() else "is not name:password"


def _mend_password(home: Path, store: Store, found: list[Damage]) -> list[str]:
    return [
        f"{one.name} ({one.why}) is set aside in {_aside(home, one.name)}; the next `draftsmith up` makes a password"
        for one in found
    ]


def _seconds(at: datetime) -> float:
    return at.replace(tzinfo=UTC).timestamp()


def _folders(place: Path) -> list[str]:
    """The keys or sessions that have a folder there."""
    if not place.is_dir():
        return []
    return sorted(path.name for path in place.iterdir() if path.is_dir() and sessions.is_part_of_path(path.name))


def _aside(home: Path, name: str) -> Path:
    """Move something of the home to `broken/`; where it is now."""
    place = _place(home, name.replace("/", "."))
    os.rename(home / name, place)
    return place


def _place(home: Path, name: str) -> Path:
    (home / "broken").mkdir(parents=True, exist_ok=True)
    return home / "broken" / f"{name}.{time.time_ns()}.{os.getpid()}"
