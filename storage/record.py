"""Records each finished artifact and each run in the journal, the history, MLflow and the registry.

    run = begin_run(home, "quickstart", params, judge, how="direct")
    record_step(artifact, "Draft", step, record, run)      # after every step, executed or reused
    end_run(run, "completed")

The journal is written first and holds everything; MLflow, DuckDB's files and the registry follow from it. When one of
them is down the run goes on: the failure becomes one line in `run.problems`, and `resync` repeats the call later.
Rows that break their schema are different: they are a fault of the step that wrote them, and raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from components.contract import Artifact, UserError
from components.outside_json import JsonObject
from components.promotion import Judge
from components.text import message_of
from storage import journal
from storage.artifacts.remote import drain_problems
from storage.artifacts.sessions import session_of
from storage.artifacts.store import Store
from storage.artifacts.sync import catch_up, send
from storage.history.files import compact
from storage.history.segments import DamagedHistory
from storage.history.write import (
    UNREADABLE,
    record_all,
    record_key,
    record_promotion,
    record_run,
    unread_reason,
)
from storage.journal import Journal
from storage.redaction import without_secrets
from storage.registry import registry, tracking
from storage.registry.tracking import ServerDown, Tracker, has_database, tracking_uri

RESYNC_HINT = "nothing is lost; `draftsmith resync` makes up for it"


class Step(Protocol):
    """The fields of a planned step that are recorded (flows/planning/plan.py: PlannedStep)."""

    @property
    def name(self) -> str: ...
    @property
    def uses(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def settings(self) -> JsonObject: ...
    @property
    def inputs(self) -> dict[str, str | list[str]]: ...
    @property
    def key(self) -> str: ...
    @property
    def reason(self) -> str: ...


class ArtifactsSkipped(Exception):
    """`resync` could not read some artifacts (`lines`, one each); everything else is recorded."""

    def __init__(self, unread: Mapping[str, str], folder: Path) -> None:
        self.lines = [f"artifact {key[:12]}: {reason}" for key, reason in unread.items()]
        super().__init__(f"all else is known now, but not {len(unread)} in {folder}: " + "; ".join(self.lines))


@dataclass
class Run:
    """One run of a pipeline while it goes on.

    problems: what could not be logged, one line each. notes: lines to show (a version was registered, ...).
    judge: the rule of the promotion gate. registered: the RegisteredVersion of each Release of this run. may_promote:
    whether the gate alone may move `champion`. trial: its releases stay out of the registry.
    """

    run_id: str
    pipeline: str
    home: Path
    judge: Judge
    journal: Journal
    tracker: Tracker
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)
    mlflow_down: bool = False
    may_promote: bool = True
    trial: bool = False

    def mlflow_run(self) -> tuple[str, str] | None:
        """(experiment, run) in MLflow; None when MLflow did not answer."""
        ids: list[tuple[str, str]] = []
        if not self.mlflow_down and self.tracker.parent is not None:
            _best_effort(self, "mlflow", lambda: ids.append(self.tracker.experiment_and_run()))
        return ids[0] if ids else None


def begin_run(
    home: Path,
    pipeline: str,
    params: JsonObject,
    judge: Judge,
    *,
    how: str = "direct",
    may_promote: bool = True,
    flow_run_id: str = "",
    pipeline_digest: str = "",
    keys: Sequence[str] = (),
    trial: bool = False,
) -> Run:
    """Open the journal of a new run.

    judge: the rule of the promotion gate (components/speedup/comparison/promotion_rule.py), for the releases of this
    run. how: "direct" or "prefect", with Prefect's id of the flow run. may_promote: the gate alone may move `champion`.
    pipeline_digest: Plan.digest. keys: of all artifacts that the run may make or use. trial: releases of this run stay
    out of the registry.

    Runs that were killed since are recorded on the way: nothing else of theirs is left to do it.
    """
    facts = {"flow_run_id": flow_run_id, "pipeline_digest": pipeline_digest}
    run_journal = Journal.start(home, pipeline, params, how, **facts, may_promote=may_promote, keys=keys, trial=trial)
    run_id = str(run_journal.entries[0]["run_id"])
    run = Run(run_id, pipeline, home, judge, run_journal, Tracker(home), may_promote=may_promote, trial=trial)
    dead: list[list[journal.Entry]] = []
    _best_effort(run, "history", lambda: dead.extend(journal.newly_dead_runs(home)))
    for entries in dead:
        _best_effort(run, "history", partial(record_run, home, entries))
        if has_database(home):
            _best_effort(run, "mlflow", partial(Tracker(home).sync, entries))
    return run


def record_refusal(
    home: Path, pipeline: str, params: JsonObject, judge: Judge, reason: str, *, how: str, flow_run_id: str = ""
) -> None:
    """Record a run that could not be planned as one that failed before its first step. reason: one line."""
    run = begin_run(home, pipeline, params, judge, how=how, flow_run_id=flow_run_id)
    run.mlflow_down = not has_database(home)  # making one takes seconds, for which a mistyped command should not wait
    end_run(run, "failed", reason, soon=True)


def record_step(
    artifact: Artifact, kind: str, step: Step, record: JsonObject, run: Run, *, reused: bool = False
) -> None:
    """Record what a step has made or reused: rows in the history, a child run in MLflow, a model version.

    record: how the artifact came to be, as the store keeps it: "seconds" and "inputs" {parameter: key or list
    of keys} are read here. A reused artifact that is in the history already costs nothing.

    Raises:
        UserError: a row of the artifact does not have the columns and types of components/rows.py.
    """
    store = Store(run.home)
    run.journal.add(
        "step",
        step=step.name,
        uses=step.uses,
        kind=kind,
        key=artifact.key,
        status="reused" if reused else "completed",
        why=step.reason,
        seconds=None if reused else record.get("seconds"),
        settings=dict(step.settings),
        inputs=_named_inputs(step, record),
        info=dict(artifact.info),
        path=_relative_to_home(run.home, artifact.path),
        session=session_of(store.record_of(artifact.key)),
    )
    _best_effort(run, "history", lambda: record_key(run.home, store, artifact.key))
    if not reused:
        _sync(run)
    if kind == "Release" and run.trial:
        run.notes.append(f"a trial: not registered; `draftsmith run {run.pipeline}` without --trial registers it")
    elif kind == "Release":
        _best_effort(run, "registry", lambda: _register(artifact, step.name, run))


def record_failure(step: Step, reason: str, seconds: float | None, run: Run) -> None:
    """Record that a step has failed, with the one-line reason."""
    run.journal.add(
        "step",
        step=step.name,
        uses=step.uses,
        kind=step.kind,
        key="",
        status="failed",
        why=reason,
        seconds=seconds,
        settings=dict(step.settings),
        inputs={},
        info={},
        path="",
    )
    _sync(run)


def end_run(run: Run, status: str, reason: str = "", *, soon: bool = False) -> None:
    """Close a run. status: "completed", "failed" or "killed", with the one-line reason.

    soon: somebody waits for it to end, so nothing is tidied up, and MLflow is left alone where it was down.
    """
    run.journal.add("end", status=status, reason=reason)
    run.journal.close()
    _best_effort(run, "history", lambda: record_run(run.home, run.journal.entries))
    if soon:
        _sync(run)
        return
    _best_effort(run, "history", lambda: compact(run.home))
    run.mlflow_down = False  # one more try: it may be back
    _sync(run)
    send(run.home)
    run.problems.extend(drain_problems())


def resync(home: Path, judge: Judge) -> dict[str, int]:
    """Record what the shared store, MLflow, the history and the registry lack; returns counts of what was read.

    It can be repeated. A service that is still down raises, since the point of the call is to bring it up to date.
    judge: as for `begin_run`.

    Raises:
        ArtifactsSkipped: some artifacts could not be read; it is raised last, when all others are recorded.
    """
    store = Store(home)
    if store.remote is not None:
        store.remote.try_again()
    send(home, everything=True)
    catch_up(home)
    unread = record_all(home, store)
    runs, tried, meant = 0, set[str](), set[str]()
    for entries in journal.all_runs(home):
        record_run(home, entries)
        runs += 1
        (tried if journal.is_trial(entries) else meant).update(e["key"] for e in entries if e.get("kind") == "Release")
    for row in journal.promotions(home):
        record_promotion(home, row)
    tracking.resync(home)
    moves = registry.moves_to_restore(home)
    keys, releases = store.keys(), 0
    for key in keys:
        try:
            kind = store.record_of(key)["kind"]
        except UNREADABLE as error:
            unread.setdefault(key, unread_reason(error))
            continue
        if kind == "Release" and key not in tried - meant:
            # outside of the above: a registry that is down is no artifact that cannot be read
            registry.register(home, store.path_of(key), judge, may_promote=not moves)
            releases += 1
    registry.restore_aliases(home, moves)
    if store.remote is not None and store.remote.is_silent:
        raise ConnectionError(drain_problems()[0])
    if unread:
        raise ArtifactsSkipped(unread, home / "store")
    return {"artifacts": len(keys), "runs": runs, "releases": releases}


def _register(artifact: Artifact, step: str, run: Run) -> None:

    source = None if run.mlflow_down or run.tracker.parent is None else run.tracker.child_run(step)
    version = registry.register(run.home, artifact.path, run.judge, source_run=source, may_promote=run.may_promote)
    run.registered.append(version)
    if version.note:
        run.notes.append(version.note)


def _sync(run: Run) -> None:
    """Bring MLflow up to date; when it is down, it is not tried again at every step."""
    if not run.mlflow_down and not _best_effort(run, "mlflow", lambda: run.tracker.sync(run.journal.entries)):
        run.mlflow_down = True


def _best_effort(run: Run, service: str, action: Callable[[], object]) -> bool:
    """Do `action`; False when it fails, with one line in `run.problems`. Store and journal hold the results anyway."""
    try:
        action()
    except UserError as error:
        if not isinstance(error, ServerDown | DamagedHistory):
            raise
        _add_problem(run, str(error) if isinstance(error, DamagedHistory) else f"{error} ({RESYNC_HINT})")
        return False
    except Exception as error:  # the services' own errors are many and of many classes
        message = message_of(error, 200)
        address = f" at {tracking_uri(run.home)}" if service in ("mlflow", "registry") else ""
        _add_problem(run, without_secrets(f"{service}{address}: {type(error).__name__}: {message} ({RESYNC_HINT})"))
        return False
    return True


def _add_problem(run: Run, line: str) -> None:
    if line not in run.problems:
        run.problems.append(line)


def _named_inputs(step: Step, record: JsonObject) -> dict[str, list[list[str]]]:
    """{parameter: [[name of the step that made it, key], ...]}; the plan knows the names, the record the keys."""
    keys = record.get("inputs", {})
    inputs = {}
    for parameter, names in step.inputs.items():
        flat_names = names if isinstance(names, list) else [names]
        value = keys.get(parameter, "")
        flat_keys = value if isinstance(value, list) else [value] * len(flat_names)
        inputs[parameter] = [list(pair) for pair in zip(flat_names, flat_keys, strict=True)]
    return inputs


def _relative_to_home(home: Path, path: Path) -> str:
    """The path relative to the home where it lies below it, so that a home can be moved."""
    return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)
