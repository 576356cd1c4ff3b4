"""The writing side of the history: its rows, made from artifacts, the journals of runs and the promotion log alone.

Every function may be repeated: what is in the history already is left as it is. So `rebuild` makes the same rows again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow.dataset import field

from components.contract import UserError
from components.files import digest_of_json
from storage import journal
from storage.artifacts.records import RECORD_FILE, ArtifactRecord
from storage.artifacts.sessions import file_key, session_of
from storage.artifacts.store import Store
from storage.history.files import history_dir, open_table, sessions_known, write_measured, write_record
from storage.history.records import (
    ArtifactRow,
    PromotionRow,
    Provenance,
    RunRow,
    StepRow,
    SupersededRow,
    TrainingMetricRow,
    as_time,
    draftsmith_version,
)
from storage.history.segments import empty, reading

UNREADABLE = (UserError, OSError, ValueError, KeyError, TypeError)
"""The errors of reading an artifact whose artifact.json was cut short, or whose rows another version has written."""


def record_artifact(home: Path, path: Path) -> None:
    """Put a finished artifact into the history: its record, and its measured rows if it has any. Idempotent.

    path: its directory, in the store or among its earlier sessions. Other sessions of its key stay as they are.

    Raises:
        UserError: a row does not have the columns and types of components/rows.py.
    """
    content: ArtifactRecord = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
    key, session = str(content["key"]), session_of(content)
    if session not in sessions_known(home, key):
        _record_session(home, path, content)
    if len(sessions_known(home, key)) > 1:
        _mark_superseded(home, key)


def _record_session(home: Path, path: Path, content: ArtifactRecord) -> None:
    """Write the rows of one session; that of the artifact comes last, since it marks the session as recorded."""
    record: Mapping[str, Any] = content["record"]
    machine = record.get("machine") or {}
    provenance = Provenance(
        artifact_key=content["key"],
        pipeline=str(record.get("pipeline", "")),
        step=str(record.get("step", "")),
        run_id=str(record.get("run_id", "")),
        machine_id=machine.get("machine_id"),
        created_at=as_time(content["finished_at"]),
        draftsmith_version=str(record.get("draftsmith_version") or draftsmith_version()),
        session=session_of(content),
    )
    row = ArtifactRow(
        artifact_key=provenance.artifact_key,
        kind=content["kind"],
        pipeline=provenance.pipeline,
        step=provenance.step,
        run_id=provenance.run_id,
        uses=str(record.get("uses", "")),
        settings=_as_json(record.get("settings", {})),
        inputs=_as_json(record.get("inputs", {})),
        info=_as_json(content["info"]),
        seconds=_as_float(record.get("seconds")),
        machine_id=provenance.machine_id,
        machine=_as_json(machine),
        created_at=provenance.created_at,
        draftsmith_version=provenance.draftsmith_version,
        session=provenance.session,
        peak_rss_mib=_as_float(record.get("peak_rss_mib")),
        num_bytes=sum(facts["size"] for facts in content["files"].values()),
        versions=_as_json(record.get("versions", {})),
        code_sha256=digest_of_json(code) if (code := (record.get("parts") or {}).get("code")) else None,
    )
    if metrics := _training_metrics(path / "metrics.jsonl", provenance):
        write_record(home, "training_metric", file_key(row.artifact_key, row.session), metrics)
    write_measured(home, path, provenance)
    write_record(home, "artifact", file_key(row.artifact_key, row.session), [row])


def _training_metrics(file: Path, provenance: Provenance) -> list[TrainingMetricRow]:
    """The numbers in metrics.jsonl, each with its optimiser steps; what is not finite was not measured."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    series: dict[str, list[tuple[int, float]]] = {}
    for row in map(json.loads, filter(None, lines)):
        for name, value in row.items():
            if name != "step" and type(value) in (int, float) and math.isfinite(value):
                series.setdefault(name, []).append((int(row["step"]), float(value)))
    origin = {name: getattr(provenance, name) for name in ("artifact_key", "pipeline", "step", "run_id", "created_at")}
    return [
        TrainingMetricRow(
            **origin,
            name=name,
            at_steps=[step for step, _ in pairs],
            values=[value for _, value in pairs],
            session=provenance.session,
        )
        for name, pairs in series.items()
    ]


def _mark_superseded(home: Path, key: str) -> None:
    """Mark the sessions of a key other than its newest valid one (where none is valid, its newest) as superseded.

    The next call marks what a kill has left out. A superseded session stays so.
    """
    columns = ["session", "created_at", "info"]
    with reading(history_dir(home)):
        rows = open_table(home, "artifact").to_table(columns=columns, filter=field("artifact_key") == key).to_pylist()
    newest = max(rows, key=lambda row: (json.loads(row["info"]).get("verdict") != "invalid", row["created_at"]))
    for row in rows:
        if row is not newest:
            session = row["session"] or ""
            superseded = SupersededRow(artifact_key=key, session=session, created_at=row["created_at"])
            write_record(home, "superseded", file_key(key, session), [superseded])


def record_all(home: Path, store: Store) -> dict[str, str]:
    """Put every session of every artifact of a store into the history; returns key -> reason of the unreadable ones.

    They are left out, so that one bad artifact cannot hide the others.
    """
    store.settle_all()
    unread, keys = {}, [*store.collected_keys(), *store.keys()]
    for key in keys:
        try:
            record_key(home, store, key)
        except UNREADABLE as error:
            unread[key] = unread_reason(error)
    return unread


def record_key(home: Path, store: Store, key: str) -> None:
    """Put every session of one artifact into the history, earlier ones too if they are missing there."""
    for session in reversed(store.sessions(key)):
        if not session.is_newest:
            record_artifact(home, session.path)
    if not store.is_collected(key):
        record_artifact(home, store.path_of(key))


def unread_reason(error: Exception) -> str:
    """The message of an `UNREADABLE` error, in one line."""
    message = " ".join(str(error).split())
    return message if isinstance(error, UserError) else f"{type(error).__name__}: {message}"


def record_run(home: Path, entries: list[journal.Entry]) -> None:
    """Put a finished run and its steps, read from its journal, into the history. Idempotent."""
    start, end = journal.first(entries, "run"), journal.first(entries, "end")
    if start is None or end is None:
        return
    steps = [entry for entry in entries if entry["entry"] == "step"]
    run = RunRow(
        run_id=start["run_id"],
        pipeline=start["pipeline"],
        params=_as_json(start["params"]),
        how=start["how"],
        status=end["status"],
        reason=end["reason"] or None,
        num_executed=sum(step["status"] != "reused" for step in steps),
        num_reused=sum(step["status"] == "reused" for step in steps),
        started_at=as_time(start["time"]),
        ended_at=as_time(end["time"]),
        git_commit=start["git_commit"],
        draftsmith_version=start["draftsmith_version"],
    )
    rows = [
        StepRow(
            run_id=run.run_id,
            pipeline=run.pipeline,
            step=step["step"],
            uses=step["uses"],
            kind=step["kind"],
            artifact_key=step["key"] or None,
            reused=step["status"] == "reused",
            why=step["why"],
            status=step["status"],
            seconds=step["seconds"],
            settings=_as_json(step["settings"]),
            inputs=_as_json(step["inputs"]),
            ended_at=as_time(step["time"]),
            session=step.get("session"),
        )
        for step in steps
    ]
    write_record(home, "step", run.run_id, rows)
    write_record(home, "run", run.run_id, [run])


def record_promotion(home: Path, row: PromotionRow) -> None:
    """Put one entry of the promotion log into the history. Idempotent."""
    write_record(home, "promotion", row.promotion_id, [row])


def rebuild(home: Path, store: Store) -> dict[str, int]:
    """Make the history anew from the store, the run journals and the promotion log; returns counts of what was read.

    Artifacts that cannot be read are left out and counted as "refused".
    """
    empty(history_dir(home))
    refused = len(record_all(home, store))
    counts = {"artifacts": len(store.keys()) - refused, "runs": 0, "promotions": 0, "refused": refused}
    for entries in journal.all_runs(home):
        record_run(home, entries)
        counts["runs"] += 1
    for row in journal.promotions(home):
        record_promotion(home, row)
        counts["promotions"] += 1
    return counts


def _as_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
