"""Finds what is damaged in a home, and repairs it from artifacts, journals, the promotion log and the history.

Nothing is deleted: what is not whole goes to `broken/`, as do an earlier history and unreadable lines of the
promotion log. The history is made anew from all the others; a journal or a promotion log that lacks entries of the
history gets them from it. The next run that needs another artifact makes it; `draftsmith resync` makes MLflow's
database, `draftsmith up` Prefect's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.contract import UserError
from components.files import sha256_of
from components.outside_json import JsonObject
from components.rows import grouped
from storage import journal
from storage.artifacts import sessions
from storage.artifacts.records import BadRecord, read_checked
from storage.artifacts.store import Store
from storage.history.files import damaged_files, files_of, history_dir, rows_of
from storage.history.records import PromotionRow
from storage.history.schema import all_tables
from storage.history.segments import reading
from storage.history.write import rebuild
from storage.registry.fact_tags import FILES
from storage.registry.tracking import database_fault

DATABASES = {
    "mlflow/mlflow.db": "`draftsmith resync` makes a new one from the journals, releases and promotions",
    "prefect/prefect.db": "the next `draftsmith up` makes a new one, and the journals keep what ran",
}
PASSWORD = "prefect/auth"
_PRESENT_VERSIONS = f"""
SELECT name, version, coalesce(storage_location, source) FROM model_versions
WHERE current_stage <> 'Deleted_Internal' AND NOT EXISTS (
    SELECT 1 FROM model_version_tags AS tag
    WHERE tag.key = '{FILES}' AND tag.name = model_versions.name AND tag.version = model_versions.version
) ORDER BY name, version"""
_FILES = (  # places where a file belongs, and a folder stops every command that comes by
    r"promotions\.jsonl|home\.json|services\.(json|pid)|runs/[^/]+\.jsonl|verified/[^/]+\.json|steps/[^/]+/[^/]+\.json"
    r"|locks/[^/]+|logs/[^/]+/[^/]+\.log|mlflow/(moving\.json|[^/]+\.db|ready-[^/]+|[^/]+\.lock)|prefect/(prefect\.db|auth)"
    r"|history/([^/]+/)?(\.\w+\.lock|[^/]+\.(parquet|json|txt))"
)


@dataclass(frozen=True)
class Damage:
    """One thing in a home that is not as it was written. name: its name among those of its kind.

    kind: "artifact", "earlier" (session of one), "folder" (where a file belongs), "journal", "promotions", "history",
    "database", "version" (of a registered model) or "password".
    """

    kind: str
    name: str
    fault: str


def find_damage(home: Path, store: Store) -> Iterator[Damage]:
    """Yield everything that is damaged; every file of every artifact is read, and nothing is changed."""
    yield from _misplaced_folders(home)
    for key in _folders(home / "store"):
        finding = store.verify_local(key, anew=True)
        if finding.artifact is None and finding.fault != "absent":
            yield Damage("artifact", key, finding.fault)
    for key in _folders(home / "earlier"):
        for session in _folders(home / "earlier" / key):
            if fault := _session_fault(home / "earlier" / key / session, key):
                yield Damage("earlier", f"{key}/{session}", fault)
    yield from _damaged_logs(home)
    of_history = list(_damaged_history(home))
    yield from of_history
    if not of_history:
        yield from _missing_log_entries(home)
    for name in DATABASES:
        if (home / name).is_file() and (fault := database_fault(home / name, whole=True)):
            yield Damage("database", name, fault)
    yield from _versions_without_files(home)
    if fault := _password_fault(home / PASSWORD):
        yield Damage("password", PASSWORD, fault)


def repair(home: Path, store: Store) -> list[str]:
    """Repair what `find_damage` finds; returns what was done, a line each. Sources of other repairs come first."""
    by_kind = grouped(list(find_damage(home, store)), lambda damage: damage.kind)
    repairs: dict[str, Callable[[Path, Store, list[Damage]], list[str]]] = {
        "folder": _repair_folders,
        "artifact": _repair_artifacts,
        "earlier": _repair_earlier,
        "promotions": _repair_promotions,
        "journal": _repair_journals,
        "history": _repair_history,
        "database": _repair_databases,
        "version": _repair_versions,
        "password": _repair_password,
    }
    lines = []
    for kind in (kind for kind in repairs if kind in by_kind):
        lines += repairs[kind](home, store, by_kind[kind])
    if "folder" in by_kind and "history" not in by_kind:  # one of them may have been a log or a journal
        for damage in list(_missing_log_entries(home)):
            lines += repairs[damage.kind](home, store, [damage])
    return lines


def _misplaced_folders(home: Path) -> Iterator[Damage]:
    for top, folders, _ in os.walk(home):
        inside = Path(top).relative_to(home)
        if inside.parts[:1] in (("store",), ("earlier",), ("records",), ("partial",), ("broken",)):
            folders.clear()
        for name in folders:
            if re.fullmatch(_FILES, (inside / name).as_posix()):
                yield Damage("folder", (inside / name).as_posix(), "is a folder where a file belongs")


def _session_fault(path: Path, key: str) -> str:
    """What is wrong with an earlier session of a key, or ''. Of kinds that are no evidence only the record is kept."""
    try:
        record = read_checked(path)
    except BadRecord as error:
        return str(error)
    if record["key"] != key or sessions.directory_name(record) != path.name:
        return f"its record is that of {record['key'][:12]} in session {sessions.directory_name(record)}"
    is_kept = record["kind"] in sessions.EVIDENCE and not (path / sessions.COLLECTED).is_file()
    for name, facts in record["files"].items() if is_kept else ():
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256_of(path / name) != facts["sha256"]:
            return f"{name} has changed since it was made"
    return ""


def _damaged_logs(home: Path) -> Iterator[Damage]:
    if not journal.promotions_file(home).is_dir():
        for line in journal.damaged_promotions(home):
            yield Damage("promotions", f"line {line} of {journal.promotions_file(home).name}", "cannot be read")
    for path in journal.journals(home):
        for line in journal.damaged_lines(path)[:1]:
            yield Damage("journal", path.stem, f"line {line} of its journal cannot be read")


def _missing_log_entries(home: Path) -> Iterator[Damage]:
    """Entries that are in the history, and missing in the promotion log or the journals."""
    if not history_dir(home).is_dir():
        return
    moves = {row["promotion_id"] for row in rows_of(home, "promotion")}
    if not journal.promotions_file(home).is_dir() and (
        missing := moves - {row.promotion_id for row in journal.promotions(home)}
    ):
        yield Damage("promotions", f"{len(missing)} entries", "are gone from the promotion log; the history has them")
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


def _damaged_history(home: Path) -> Iterator[Damage]:
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


def _versions_without_files(home: Path) -> Iterator[Damage]:
    """Versions of registered models, in the database of this home, whose model is not where it should be."""
    file = home / "mlflow" / "mlflow.db"
    if not file.is_file() or database_fault(file):
        return
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as database:
        has_versions = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'model_versions'").fetchone()[
            0
        ]
        rows = database.execute(_PRESENT_VERSIONS).fetchall() if has_versions else []
    for name, version, address in rows:
        parts = urlsplit(address or "")
        folder = Path(url2pathname(parts.path))
        is_ours = folder.is_relative_to((home / "mlflow").absolute())
        if parts.scheme in ("", "file") and not (folder / "MLmodel" if is_ours else folder).exists():
            yield Damage("version", f"{name} version {version}", f"cannot be loaded: its files are not in {folder}")


def _repair_versions(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    return [f"{damage.name} {damage.fault}; `draftsmith resync` makes them from its release" for damage in damages]


def _repair_folders(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    return [
        f"{damage.name} ({damage.fault}) is set aside in {_move_to_broken(home, damage.name)}" for damage in damages
    ]


def _repair_artifacts(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    lines = []
    for damage in damages:
        with store.lock(damage.name):
            lines.append(f"{damage.name[:12]} ({damage.fault}) is set aside in {store.quarantine(damage.name)}")
    return lines


def _repair_earlier(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    lines = []
    for damage in damages:
        with store.lock(damage.name.partition("/")[0]):
            place = _move_to_broken(home, f"earlier/{damage.name}")
        lines.append(f"an earlier session of {damage.name[:12]} ({damage.fault}) is set aside in {place}")
    return lines


def _repair_promotions(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    lines = []
    if journal.damaged_promotions(home):
        aside = _broken_path(home, "promotions.jsonl")
        number = journal.set_damaged_aside(home, aside)
        lines.append(f"{number} unreadable lines of the promotion log are set aside in {aside}")
    if not any(_damaged_history(home)):
        logged_ids = {row.promotion_id for row in journal.promotions(home)}
        rows = [PromotionRow(**row) for row in rows_of(home, "promotion") if row["promotion_id"] not in logged_ids]
        if rows:
            journal.add_promotions(home, sorted(rows, key=lambda row: row.promoted_at))
            lines.append(f"{len(rows)} entries of the promotion log are taken from the history")
    return lines


def _repair_journals(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    """Write the journals of runs anew: the readable entries, and for the others the rows of the history."""
    lines = []
    is_whole = not any(_damaged_history(home))
    runs = {row["run_id"]: row for row in rows_of(home, "run")} if is_whole else {}
    steps = rows_of(home, "step") if is_whole else []
    infos = (
        {(row["artifact_key"], row["session"]): row["info"] for row in rows_of(home, "artifact")} if is_whole else {}
    )
    for run_id in sorted({damage.name for damage in damages}):
        path = home / "runs" / f"{run_id}.jsonl"
        entries = journal.read(path) if path.is_file() else []
        aside = _move_to_broken(home, f"runs/{path.name}") if path.exists() else None
        if run_id in runs:
            entries = _journal_entries(runs[run_id], [row for row in steps if row["run_id"] == run_id], infos, entries)
        if journal.first(entries, "run") is not None:
            journal.write_anew(path, entries)
        former = f"what it was is in {aside}" if aside else "there was none"
        how = "made anew with the history" if run_id in runs else "kept as far as it can be read"
        lines.append(f"the journal of run {run_id} is {how}; {former}")
    return lines


def _journal_entries(
    run: JsonObject, steps: list[JsonObject], infos: dict[tuple[str, str], str], readable: list[journal.Entry]
) -> list[journal.Entry]:
    """The entries of a journal, made from its rows in the history; readable entries stay as they are."""
    start = journal.first(readable, "run") or {
        "entry": "run",
        **{name: run[name] for name in ("run_id", "pipeline", "how", "git_commit", "draftsmith_version")},
        "params": json.loads(run["params"]),
        "flow_run_id": "",
        "pipeline_digest": "",
        "may_promote": False,  # the history does not keep whether the run wanted an approval
        "time": _seconds(run["started_at"]),
    }
    readable_steps = {entry["step"]: entry for entry in readable if entry["entry"] == "step"}
    step_entries = [
        readable_steps.get(row["step"])
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
    end = journal.first(readable, "end")
    return [start, *step_entries, end if end is not None and end["status"] == run["status"] else last]


def _repair_history(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    copy = _broken_path(home, "history")
    shutil.copytree(history_dir(home), copy)
    counts = rebuild(home, store)
    contents = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return [f"the history is made anew ({contents or 'nothing to put into it'}); what it was is in {copy}"]


def _repair_databases(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    lines = []
    for damage in damages:
        file = home / damage.name
        for beside in [*file.parent.glob(f"{file.name}-*"), *file.parent.glob("ready-*")]:
            _move_to_broken(home, beside.relative_to(home).as_posix())
        lines.append(
            f"{damage.name} ({damage.fault}) is set aside in {_move_to_broken(home, damage.name)}; "
            f"{DATABASES[damage.name]}"
        )
    return lines


def _password_fault(file: Path) -> str:
    """What is wrong with the file of the servers' password, or ''."""
    if not file.is_file():
        return ""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        return "is no text"
    return "" if ":" in text and text.isprintable() else "is not name:password"


def _repair_password(home: Path, store: Store, damages: list[Damage]) -> list[str]:
    return [
        f"{damage.name} ({damage.fault}) is set aside in {_move_to_broken(home, damage.name)}; "
        "the next `draftsmith up` makes a password"
        for damage in damages
    ]


def _seconds(at: datetime) -> float:
    return at.replace(tzinfo=UTC).timestamp()


def _folders(place: Path) -> list[str]:
    """The names of keys or sessions that have a folder in `place`."""
    if not place.is_dir():
        return []
    return sorted(path.name for path in place.iterdir() if path.is_dir() and sessions.is_path_part(path.name))


def _move_to_broken(home: Path, name: str) -> Path:
    """Move a file or folder of the home to `broken/`; returns its new path."""
    place = _broken_path(home, name.replace("/", "."))
    os.rename(home / name, place)
    return place


def _broken_path(home: Path, name: str) -> Path:
    (home / "broken").mkdir(parents=True, exist_ok=True)
    return home / "broken" / f"{name}.{time.time_ns()}.{os.getpid()}"
