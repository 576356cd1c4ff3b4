"""PREFECT: one flow around the engine, one task a step; run from the command line, or by a worker as a deployment.

The engine decides everything (what is reused, which child process, retries); Prefect watches, schedules and remembers.
Its result cache is off: the store is the only cache. A wrong input ends as the state Failed with the one line that says
why, never as a traceback. A run that registered a release ends as what became of it ("Promoted", "NotPromoted",
"Waiting"), any other whole run as "Completed"; a dry run, a part of a run and a night without news have names of their
own, so that they do not start the pipelines that start after this one. This module imports
Prefect, so flows/orchestration/prefect_server.py must have prepared its settings before.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prefect import Flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Completed, Failed

from components.contract import Artifact, NothingNew, Page, UserError
from components.text import shorten
from flows.execution.clusters import PACKAGE_OF, deliver_queued
from flows.execution.engine import Engine, OnEvent
from flows.execution.local_run import RunOutcome, execute, plan_to_run, record_unplanned
from flows.execution.messages import Event, RunConnection, StepFailed, disk_fault
from flows.orchestration.approval import ask, unasked
from flows.orchestration.compiled_flow import compile_flow
from flows.orchestration.notifications import Happened, happened_in, state_after, tell
from flows.orchestration.prefect_server import TemporaryServer
from flows.orchestration.retry import try_again
from flows.orchestration.ui_artifacts import Screen, links_of
from flows.planning.plan import Plan, PlannedStep, RunOptions, plan_run
from flows.spec.references import Values
from flows.spec.schema import PipelineSpec
from storage.artifacts.store import Store


def run_with_prefect(
    plan: Plan, store: Store, options: RunOptions, on_event: OnEvent, server: TemporaryServer | None
) -> RunOutcome:
    """Run a plan as a Prefect flow in this process and keep everything it makes.

    server: the temporary server of prefect_server.py, which may still be coming up; None: one that stays, so that
    somebody may answer in its UI.

    Raises:
        UserError: the input of a step is wrong.
        StepFailed: a step failed after its retries.
    """
    results: list[RunOutcome | BaseException] = []

    def body(values: Values) -> Any:
        return run_as_tasks(plan, store, on_event, results, options.to_step is None, somebody_may_answer=server is None)

    assert plan.declared is not None, "make_plan says what it has planned"
    compiled = compile_flow(plan.declared, plan.pipeline, body)
    form: dict[str, Any] = {"from_step": options.from_step, "to_step": options.to_step, "force": list(options.force)}
    form["trial"] = options.trial
    try:
        if server is not None:
            server.wait()
        compiled(**plan.params, **form, return_state=True)
    finally:
        if server is not None:
            deliver_queued(at_exit=True)  # once its server has stopped they are retried for a minute
    assert results, "Prefect ran the flow without running its body"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def run_as_tasks(
    plan: Plan,
    store: Store,
    on_event: OnEvent | None,
    results: list[RunOutcome | BaseException],
    whole: bool = True,
    somebody_may_answer: bool = True,
) -> Any:
    """The body of every flow: each step of the plan is a task; returns the flow's final state.

    results: receives the outcome or the error of the run, for a caller in the same process.
    whole: the run goes to the pipeline's end. somebody_may_answer: there is a UI to ask for an approval in.
    """
    screen = Screen(plan, store, watched=somebody_may_answer)
    screen.show_plan()

    def forward_event(step: PlannedStep, event: Event) -> None:
        screen.on_event(step, event)
        if on_event is not None:
            on_event(step, event)

    happened: Happened = []

    def conclude(outcome: RunOutcome) -> list[str]:
        screen.leave_machine()
        screen.show_outcome(outcome)  # before anybody is asked
        files = [page.path / "index.html" for page in outcome.artifacts.values() if isinstance(page, Page)]
        links = links_of(store, outcome) or [("the report", file.as_uri()) for file in files]
        happened.extend(happened_in(outcome))
        lines = _tell(plan, happened, somebody_may_answer, links)
        answered, unanswered = _ask_approval(plan, store, outcome, screen, somebody_may_answer)
        happened.extend(answered)
        lines += [*(line for _, line in answered), *unanswered, *_tell(plan, answered, somebody_may_answer, links)]
        return lines + try_again(plan, outcome)

    try:
        outcome = execute(
            plan,
            store,
            forward_event,
            how="prefect",
            flow_run_id=str(flow_run.id),
            run_steps=lambda engine: _run_as_prefect_tasks(engine, screen),
            conclude=conclude,
        )
        screen.show_outcome(outcome)
    except (UserError, StepFailed) as error:
        results.append(error)
        screen.show_failure(error)
        if not somebody_may_answer:  # else the server's own event of it is told
            _tell(plan, [("failed", str(error))], somebody_may_answer)
        return Failed(message=str(error))
    except BaseException as error:
        results.append(error)
        if fault := disk_fault(error, store.home):
            return Failed(message=fault)
        raise
    finally:
        screen.leave_machine()
    results.append(outcome)
    if outcome.nothing_new:
        return Completed(name="NothingNew", message=f"nothing new: {outcome.nothing_new}")
    made_new = len(screen.reused) < len(plan.steps)  # else that is what was decided
    done = [f"{len(plan.steps)} steps, {len(screen.reused)} of them reused"] * made_new
    message = "; ".join([*done, *outcome.decided])
    return Completed(name=state_after(happened) if whole else "Partial", message=message)


def _tell(plan: Plan, happened: Happened, watched: bool, links: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Tell whom the pipeline names; one line for each that could not be told."""
    notify = plan.declared.notify if plan.declared is not None else None
    return tell(plan.pipeline, happened, notify, links, watched=watched)


def _ask_approval(
    plan: Plan, store: Store, outcome: RunOutcome, screen: Screen, somebody_may_answer: bool
) -> tuple[Happened, list[str]]:
    """Ask for approval of new champions if the pipeline requires it: (answers, lines where nobody could be asked)."""
    if plan.approval_minutes is None or outcome.nothing_new:
        return [], []
    if not somebody_may_answer:
        return [], unasked(store.home, outcome)
    return ask(store.home, outcome, plan.approval_minutes, screen.note), []


def _run_as_prefect_tasks(engine: Engine, screen: Screen) -> dict[str, Artifact]:
    """Run the plan's steps in order, each as a Prefect task."""
    connect_clusters(engine)
    artifacts: dict[str, Artifact] = dict(engine.plan.sources)
    for step in engine.plan.steps:
        failure: list[Exception] = []  # or NothingNew, which ends the run without a fault

        def body(step: PlannedStep = step, failure: list[Exception] = failure) -> Any:
            try:
                artifact = artifacts[step.name] = engine.run_step(step, artifacts)
            except NothingNew as nothing:
                failure.append(nothing)
                return Completed(name="NothingNew", message=str(nothing))
            except (UserError, StepFailed) as error:  # final: the engine has made its retries
                failure.append(error)
                return Failed(message=str(error))
            screen.show_artifact(step, artifact)
            reused = step.name in screen.reused
            return Completed(
                name="Reused" if reused else "Completed", message=f"{step.kind} {step.key[:12]}: {step.reason}"
            )

        as_task = task(
            body,
            name=step.name,
            task_run_name=f"{step.name} (reused)" if step.reused else step.name,
            description=f"{step.uses} -> {step.kind} {step.key}",
            tags=[step.uses] + ["reused"] * step.reused + ["measures alone"] * step.measures,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=0,
        )
        state = as_task(return_state=True)
        if failure:
            raise failure[0]
        if step.name not in artifacts:  # of Prefect's own doing: its server did not answer, or said no
            message = f"Prefect did not let it run ({state.name}: {shorten(state.message)}); the same command goes on"
            raise StepFailed(step.name, message, engine.log_of(step))
    return {step.name: artifacts[step.name] for step in engine.plan.steps}


def connect_clusters(engine: Engine) -> None:
    """Let the steps of this engine use clusters, inside the flow that the engine runs in.

    Raises:
        UserError: a step wants a cluster whose package is not installed.
    """
    for step in engine.plan.steps:
        cluster = step.runs_on.cluster
        if cluster is not None and not step.reused and importlib.util.find_spec(PACKAGE_OF[cluster]) is None:
            need = f"pip install 'draftsmith[{cluster}]' -c constraints.txt"
            raise UserError(
                f"{engine.plan.file}:{step.line}: step '{step.name}' runs on {cluster}, not installed: {need}"
            )
    engine.connection = _connection


def _connection() -> RunConnection:
    """What a child process needs to report to this run, as JSON values."""
    run = FlowRunContext.get()
    assert run is not None and run.flow_run is not None, "a step of a Prefect run is a task inside its flow"
    environment = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}
    environment |= get_current_settings().to_environment_variables(exclude_unset=True, include_secrets=True)
    return {"flow_run_id": str(run.flow_run.id), "environment": environment}


def catalog_flow(name: str, declared: PipelineSpec, options: RunOptions) -> Flow[..., Any]:
    """The flow of a pipeline as deployments run it: it plans with the parameters it is given, then runs."""

    def body(values: Values) -> Any:
        params = dict(values)
        dry_run = bool(params.pop("dry_run", False))
        run_options = replace(
            options,
            from_step=params.pop("from_step", None),
            to_step=params.pop("to_step", None),
            force=tuple(params.pop("force", None) or ()),
            trial=bool(params.pop("trial", False)),
        )
        try:
            if dry_run:
                plan, store = plan_run(name, params, run_options)
            else:
                plan, store = plan_to_run(name, params, run_options, how="prefect", flow_run_id=str(flow_run.id))
        except UserError as error:
            return Failed(message=str(error))
        if dry_run:
            Screen(plan, store).show_plan(nothing_runs=True)
            num_to_run = len(plan.steps) - plan.num_reused
            return Completed(
                name="Planned", message=f"nothing was run: {plan.num_reused} steps reused, {num_to_run} to run"
            )
        return run_as_tasks(plan, store, None, [], whole=run_options.to_step is None)

    return compile_flow(declared, name, body)


def refused_flow(name: str, wrong: str) -> Flow[..., Any]:
    """The flow of a run whose pipelines file cannot be read, or has no such pipeline: it says so and is recorded.

    wrong: a line for each thing that is wrong. It takes whatever parameters this flow run was given.
    """

    def run(**values: Any) -> Any:
        reason = "; ".join(wrong.splitlines())
        record_unplanned(Store().home, name, values, reason, how="prefect", flow_run_id=str(flow_run.id))
        return Failed(message=reason)

    parameters = [inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY) for key in flow_run.parameters]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Flow(run, name=name, persist_result=False, validate_parameters=False)
