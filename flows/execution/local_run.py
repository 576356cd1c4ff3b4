"""A run: the engine on a plan, and the records of what it makes; flows/orchestration/flow.py puts a flow around it.

However a run ends - it could not be planned, had nothing to do, failed, was cancelled - its one-line reason stands in
the journal, the history and MLflow, and Prefect shows the same line.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.contract import Artifact, DepthPolicy, NothingNew, Release, UserError
from components.outside_json import JsonObject
from components.speedup.comparison.promotion_rule import judge
from components.tables import format_bytes
from components.text import message_of
from flows.execution.cost_ahead import cost_ahead
from flows.execution.engine import Engine, OnEvent
from flows.execution.hubs import reach_hubs
from flows.execution.messages import Event, StepFailed, disk_fault
from flows.planning.plan import Plan, PlannedStep, RunOptions, plan_run
from flows.spec.references import Values
from flows.spec.schema import PipelineSpec
from storage.artifacts.store import Store, require_writable
from storage.collect import collect, find_items
from storage.journal import goes_on
from storage.record import Run, begin_run, end_run, record_failure, record_refusal, record_step
from storage.redaction import without_secrets


@dataclass(frozen=True)
class RunOutcome:
    """The result of a run. problems: what could not be logged; notes: remarks for the user; one line each.

    mlflow_run: (experiment, run) in MLflow; None when it was down. registered: the registry's answer for each Release.
    noise: what disturbed a measurement that the gate refused, in one line; "" where that did not happen.
    decided: what became of its releases, what disturbed their measurement and what follows from that, or that all was
    reused; one line each.
    nothing_new: why a step ended the run early with nothing to do, in one line; "" when every step was made or reused.
    """

    plan: Plan
    artifacts: dict[str, Artifact]
    seconds: float
    run_id: str = ""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    registered: tuple[Any, ...] = ()
    mlflow_run: tuple[str, str] | None = None
    nothing_new: str = ""
    noise: str = ""
    decided: tuple[str, ...] = ()

    @property
    def release_key(self) -> str:
        """The key of the last Release; "" without one."""
        return next(
            (artifact.key for artifact in reversed(self.artifacts.values()) if isinstance(artifact, Release)), ""
        )


def plan_to_run(
    pipeline: str,
    params: Values | Sequence[str],
    options: RunOptions,
    *,
    how: str,
    flow_run_id: str = "",
    on_refusal: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, Store]:
    """As `plan_run`, with its cost; a run that may not reach hubs, cannot be planned or surely has no room is recorded
    as one that failed.

    how, flow_run_id: as for `execute`. on_refusal: hears the reason of such a run, one line, when it is recorded.

    Raises:
        UserError: one line for each thing that is wrong.
    """

    def record(home: Path, values: Values, reason: str) -> None:
        record_unplanned(home, pipeline, values, reason, how=how, flow_run_id=flow_run_id)
        on_refusal(reason)

    def require_hubs(declared: PipelineSpec) -> None:
        reach_hubs(pipeline, declared=declared.online, asked=options.online)

    plan, store = plan_run(pipeline, params, options, record, require_hubs)
    try:
        return replace(plan, cost=cost_ahead(plan, store, options.file)), store
    except UserError as error:
        record(store.home, plan.params, "; ".join(str(error).splitlines()))
        raise


def record_unplanned(
    home: Path, pipeline: str, params: Values, reason: str, *, how: str, flow_run_id: str = ""
) -> None:
    """Record a run that could not be planned, in a home that is there. reason: one line."""
    if home.is_dir():  # a first command that is mistyped leaves nothing behind
        require_writable(home)
        record_refusal(home, pipeline, dict(params), judge, reason, how=how, flow_run_id=flow_run_id)


def execute(
    plan: Plan,
    store: Store,
    on_event: OnEvent | None = None,
    *,
    how: str,
    flow_run_id: str = "",
    run_steps: Callable[[Engine], dict[str, Artifact]] = Engine.run,
    conclude: Callable[[RunOutcome], list[str]] = lambda _: [],
) -> RunOutcome:
    """Run a plan and keep what it makes.

    how: "direct" or "prefect", for the record, with Prefect's id of the flow run. run_steps: runs an engine.
    conclude: does what is left when the steps are done; its lines become a part of what was decided.
    """
    started = time.monotonic()
    run = begin_run(
        store.home,
        plan.pipeline,
        plan.params,
        judge,
        how=how,
        may_promote=plan.approval_minutes is None,
        flow_run_id=flow_run_id,
        pipeline_digest=plan.digest,
        keys=[*(artifact.key for artifact in plan.sources.values()), *(step.key for step in plan.steps)],
        trial=plan.trial,
    )
    running_steps: dict[str, PlannedStep] = {}
    artifacts: dict[str, Artifact] = {}
    made_new: list[str] = []

    def on_step_event(step: PlannedStep, event: Event) -> None:
        if event["event"] == "start":
            running_steps[step.name] = step
        if on_event is not None:
            on_event(step, event)

    def on_finished(step: PlannedStep, artifact: Artifact, record: JsonObject, seconds: float, reused: bool) -> None:
        running_steps.pop(step.name, None)
        artifacts[step.name] = artifact
        made_new.extend([step.name] * (not reused))
        record_step(artifact, step.kind, step, record, run, reused=reused)

    nothing_new = ""
    with closing(run.journal):  # also where its last lines find no room on the disk
        try:
            try:
                run_steps(Engine(store, plan, on_step_event, on_finished, run_id=run.run_id))
            except NothingNew as nothing:
                nothing_new = "; ".join([f"{nothing}; `draftsmith run {plan.pipeline}` looks again", *plan.remarks])
            noise, decided = _decided(plan, run, artifacts, made_new=bool(made_new), nothing_new=nothing_new)
            outcome = RunOutcome(
                plan=plan,
                artifacts=artifacts,
                seconds=time.monotonic() - started,
                run_id=run.run_id,
                problems=tuple(run.problems),
                notes=tuple(run.notes),
                registered=tuple(run.registered),
                mlflow_run=run.mlflow_run(),
                nothing_new=nothing_new,
                noise=noise,
                decided=tuple(decided),
            )
            concluded = conclude(outcome)
        except Exception as error:
            reason = _reason_of(error, store.home)
            for step in running_steps.values():
                record_failure(step, reason, None, run)
            end_run(run, "failed", reason)
            for line in itertools.chain(*_tidy(plan, store)):  # a disk that is full is why many a night fails
                error.add_note(line)
            raise
        except BaseException as error:  # Ctrl-C, or Prefect's signal of a cancel
            reason = "interrupted" if isinstance(error, KeyboardInterrupt) else f"cancelled ({type(error).__name__})"
            end_run(run, "killed", reason + goes_on(plan.pipeline), soon=True)
            raise
        reasons = [f"nothing new: {nothing_new}"] if nothing_new else decided
        end_run(run, "completed", "; ".join([*reasons, *concluded]))
    freed, not_freed = _tidy(plan, store)
    return replace(
        outcome,
        mlflow_run=run.mlflow_run(),
        problems=(*run.problems, *not_freed),
        notes=(*run.notes, *freed, *concluded),
        decided=(*decided, *concluded),
    )


def _decided(
    plan: Plan, run: Run, artifacts: dict[str, Artifact], *, made_new: bool, nothing_new: str
) -> tuple[str, list[str]]:
    """`noise` and `decided` of RunOutcome."""
    if nothing_new:
        return "", []
    if not made_new:
        return "", [f"nothing new: all {len(artifacts)} steps are reused", *plan.remarks]
    policies = [artifact for artifact in artifacts.values() if isinstance(artifact, DepthPolicy)]
    noise = str(policies[-1].info.get("noise", "")) if policies else ""
    decided = [version.note for version in run.registered if version.note]
    decided += [f"the measurement was disturbed: {noise}"] if noise else []
    return noise, decided + [line for line in plan.remarks if not any(line in note for note in decided)]


def _reason_of(error: Exception, home: Path) -> str:
    """Why a run failed, in one line: what it was told, which disk is full, else the error and its message."""
    if isinstance(error, UserError | StepFailed):
        return str(error)
    return without_secrets(disk_fault(error, home) or f"{type(error).__name__}: {message_of(error)}")


def _tidy(plan: Plan, store: Store) -> tuple[list[str], list[str]]:
    """Let go what `retention:` does not keep, where it runs after this pipeline; (what was freed, why nothing was)."""
    rule = plan.retention
    if rule is None:
        return [], []
    try:
        items = find_items(store.home, store, runs=rule.keep_runs, versions=rule.keep_versions, features=rule.features)
        gone = collect(store.home, store, items)
    except (UserError, OSError) as error:
        return [], [f"retention: {message_of(error, 200)}; `draftsmith gc` does it later"]
    size = format_bytes(sum(item.num_bytes for item in gone))
    return ([f"retention: {size} freed, {len(gone)} artifacts and the like"] if gone else []), []
