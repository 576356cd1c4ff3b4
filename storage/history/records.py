"""The rows that storage itself writes: runs, their steps, their artifacts, promotions.

They stand beside the measured tables of components/rows.py and follow the same rule: `None` means "not known", never
zero. Settings and other nested facts are JSON text, so that a column never changes its type (`settings ->> 'method'`).
Times are UTC. Everything here can be derived again: runs and steps from the journals, artifacts from the store,
promotions from the promotion log.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_type_hints

from components.rows import TABLES


@dataclass(frozen=True)
class Provenance:
    """The origin of a measured row; its fields are added to every row of the tables in components/rows.py.

    session: the session of the artifact (storage/artifacts/sessions.py); "" from before there were sessions.
    """

    artifact_key: str
    pipeline: str
    step: str
    run_id: str
    machine_id: str | None
    created_at: datetime
    draftsmith_version: str
    session: str = ""


@dataclass(frozen=True)
class RunRow:
    """One finished run of a pipeline. status: completed | failed | killed (ended without saying so)."""

    run_id: str
    pipeline: str
    params: str
    how: str  # direct | prefect
    status: str
    reason: str | None
    num_executed: int
    num_reused: int
    started_at: datetime
    ended_at: datetime
    git_commit: str | None
    draftsmith_version: str


@dataclass(frozen=True)
class StepRow:
    """One step of one run. artifact_key is None when the step failed."""

    run_id: str
    pipeline: str
    step: str
    uses: str
    kind: str
    artifact_key: str | None
    reused: bool
    why: str  # why it ran or was reused, or how it failed
    status: str  # completed | reused | failed
    seconds: float | None
    settings: str
    inputs: str
    ended_at: datetime
    session: str | None = None  # of the artifact, as it was then


@dataclass(frozen=True)
class ArtifactRow:
    """One session of an artifact: a key that was made again has a row for each."""

    artifact_key: str
    kind: str
    pipeline: str
    step: str
    run_id: str
    uses: str
    settings: str
    inputs: str
    info: str
    seconds: float | None
    machine_id: str | None
    machine: str
    created_at: datetime
    draftsmith_version: str
    session: str = ""
    peak_rss_mib: float | None = None
    num_bytes: int | None = None
    versions: str = "{}"
    code_sha256: str | None = None


@dataclass(frozen=True)
class TrainingMetricRow:
    """One number that a training step recorded as it went: its values at some optimiser steps, in order."""

    artifact_key: str
    pipeline: str
    step: str
    run_id: str
    name: str
    at_steps: list[int]
    values: list[float]
    created_at: datetime
    session: str = ""


@dataclass(frozen=True)
class SupersededRow:
    """A session of an artifact that is not the newest valid one of its key: its rows stay, views leave them out."""

    artifact_key: str
    session: str
    created_at: datetime  # that of its rows: with the key it tells them apart from those of other sessions


@dataclass(frozen=True)
class PromotionRow:
    """One move of an alias, or newer evidence for a version: who, why, from which version to which, on what numbers."""

    promotion_id: str
    promoted_at: datetime
    name: str
    alias: str
    action: (
        # publish | promote | force (the gate was overridden) | rollback | external (moved in MLflow by somebody) |
        # restore (to where it was before the registry was made anew), or
        # evidence (the version was measured again; no alias moves, and `alias` is "")
        str
    )
    from_version: int | None
    to_version: int | None  # None: the alias was taken away
    who: str
    why: str
    numbers: str


def new_promotion(
    name: str,
    alias: str,
    action: str,
    from_version: int | None,
    to_version: int | None,
    who: str,
    reason: str,
    numbers: Mapping[str, str],
) -> PromotionRow:
    """A move of an alias made now. numbers: the facts on which it was decided."""
    at = now()
    return PromotionRow(
        promotion_id=f"{at:%Y%m%d-%H%M%S-%f}-{uuid.uuid4().hex[:8]}",
        promoted_at=at,
        name=name,
        alias=alias,
        action=action,
        from_version=from_version,
        to_version=to_version,
        who=who,
        why=reason,
        numbers=json.dumps(dict(numbers), sort_keys=True),
    )


# Table name -> row type, for everything that has a Parquet file. Measured tables carry Provenance besides.
RECORDS: dict[str, type[Any]] = {
    "run": RunRow,
    "step": StepRow,
    "artifact": ArtifactRow,
    "training_metric": TrainingMetricRow,
    "superseded": SupersededRow,
    "promotion": PromotionRow,
}
MEASURED: dict[str, type[Any]] = TABLES


def columns_of(table: str) -> dict[str, Any]:
    """Column name -> Python type of a table, provenance included; the order is the order in Parquet."""
    row_type = RECORDS.get(table) or MEASURED[table]
    if row_type not in _known_columns:  # reading type hints takes a millisecond, and every question asks for all tables
        hints = get_type_hints(row_type)
        _known_columns[row_type] = {field.name: hints[field.name] for field in dataclasses.fields(row_type)}
    columns = _known_columns[row_type]
    return dict(columns) if table in RECORDS else columns | get_type_hints(Provenance)


_known_columns: dict[type[Any], dict[str, Any]] = {}


def now() -> datetime:
    """The current time, UTC without a zone mark: the form in which the history keeps times."""
    return datetime.now(UTC).replace(tzinfo=None)


def as_time(value: Any) -> datetime:
    """A time as artifact records keep it (seconds since 1970, or ISO text), in the form of the history."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return datetime.fromtimestamp(value, UTC).replace(tzinfo=None)
    time = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time


@cache
def draftsmith_version() -> str:
    """The installed version of Draftsmith."""
    try:
        return version("draftsmith")
    except PackageNotFoundError:
        return "unknown"
