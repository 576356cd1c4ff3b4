"""PREFECT: one flow around the engine, one task a step; run from the command line, or by a worker as a deployment.

The engine decides everything (what is reused, which child process, retries); Prefect watches, schedules and remembers.
Its result cache is off: the store is the only cache. A wrong input ends as the state Failed with the one line that says
why, never as a traceback. Only a whole run ends as "Completed", so that pipelines that start after this one are not
started by a dry run, a part of a run or a night without news. `prepare` must come before Prefect is first imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import Flow, task
from prefect.cache_policies import NO_CACHE
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from components.contract import Artifact, NothingNew, UserError
from flows.execution.clusters import connect
from flows.execution.engine import Engine, OnEvent, StepFailed
from flows.execution.local_run import RunOptions, RunOutcome, execute, plan_run
from flows.orchestration.approval import ask, unasked
from flows.orchestration.temporary_server import answers, temporary_server
from flows.orchestration.ui_artifacts import Screen
from flows.planning.plan import Plan, PlannedStep
from flows.services.client import QUIET, client_environment, running
from flows.spec.diagnostics import one_line
from flows.spec.schema import load_spec, pipeline_of
from storage.artifacts.store import Store
from storage.redaction import without_secrets

DELIVERY_TIMEOUT_S = 20.0


def run_with_prefect(pipeline: str, params: Mapping[str, Any], options: RunOptions) -> RunOutcome:
    """Run a pipeline as a Prefect flow and keep everything it makes.

    A server that answers at $PREFECT_API_URL is used; otherwise a temporary one, whose database stands under
    the home, so that every run is in the history that the UI shows.

    Raises:
        UserError: the input is wrong.
        StepFailed: a step failed after its retries.
    """
    plan, store = plan_run(pipeline, params, options)  # wrong input is told before a server is started
    if options.on_plan is not None:
        options.on_plan(plan)
    if prepare(store.home):
        return _run_flow(plan, store, options, somebody_may_answer=True)
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    with temporary_server(Path(os.environ["PREFECT_HOME"])) as server:
        before = {name: os.environ.pop(name, None) for name in server.client_environment}
        os.environ.update(server.client_environment)
        try:
            return _run_flow(plan, store, options, ready=server.wait)
        finally:
            _deliver_queued()
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _run_flow(
    plan: Plan,
    store: Store,
    options: RunOptions,
    ready: Callable[[], None] | None = None,
    somebody_may_answer: bool = False,
) -> RunOutcome:
    """Compile the plan's pipeline, wait until its server is ready, run the flow in this process."""
    from flows.catalog import compile_flow

    results: list[RunOutcome | BaseException] = []

    def body(values: Mapping[str, Any]) -> Any:
        whole = options.to_step is None
        return run_as_tasks(plan, store, options.on_event, results, whole, somebody_may_answer)

    compiled = compile_flow(pipeline_of(load_spec(options.file), plan.pipeline), plan.pipeline, body)
    if ready is not None:
        ready()
    form = {"from_step": options.from_step, "to_step": options.to_step, "force": list(options.force)}
    compiled(**plan.params, **form, return_state=True)
    assert results, "Prefect ran the flow without running its body"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def _deliver_queued() -> None:
    """Deliver the logs and events in Prefect's queues; once its server has stopped they are retried for a minute."""

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=DELIVERY_TIMEOUT_S)


def prepare(home: Path) -> str:
    """Set Prefect's environment: quiet, no telemetry, and where its server is; returns that address, "" for none.

    The server at $PREFECT_API_URL comes first, then the one of `draftsmith up`.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the terminal has our own progress
    place = Path(os.environ.setdefault("PREFECT_HOME", str(home / "prefect")))
    place.mkdir(parents=True, exist_ok=True)
    address = os.environ.get("PREFECT_API_URL", "")
    if address and answers(address):
        return address
    services = running(home)
    reachable = services is not None and answers(services.prefect_api_url)
    if address:
        instead = "the one of `draftsmith up`" if reachable else "a temporary one"
        sys.stderr.write(f"no Prefect server answers at {without_secrets(address)}: taking {instead}\n")
    if services is None or not reachable:
        return ""
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    os.environ.update(client_environment(services))
    return services.prefect_api_url


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

    def forward_event(step: PlannedStep, event: Mapping[str, Any]) -> None:
        screen.on_event(step, event)
        if on_event is not None:
            on_event(step, event)

    try:
        outcome = execute(
            plan,
            store,
            forward_event,
            how="prefect",
            flow_run_id=str(flow_run.id),
            run_steps=lambda engine: _run_as_prefect_tasks(engine, screen),
        )
        screen.leave_machine()
        screen.show_outcome(outcome)
        answers = _ask_approval(plan, store, outcome, screen, somebody_may_answer)
    except (UserError, StepFailed) as error:
        results.append(error)
        return Failed(message=str(error))
    except BaseException as error:
        results.append(error)
        raise
    finally:
        screen.leave_machine()
    results.append(replace(outcome, notes=(*outcome.notes, *answers)))
    if outcome.nothing_new:
        return Completed(name="NothingNew", message=f"nothing new: {outcome.nothing_new}")
    message = "; ".join([f"{len(plan.steps)} steps, {len(screen.reused)} of them reused", *answers])
    return Completed(name="Completed" if whole else "Partial", message=message)


def _ask_approval(
    plan: Plan, store: Store, outcome: RunOutcome, screen: Screen, somebody_may_answer: bool
) -> list[str]:
    """Ask for approval of new champions if the pipeline requires it; returns one line for each answer."""
    if plan.approval_minutes is None or outcome.nothing_new:
        return []
    if not somebody_may_answer:
        return unasked(store.home, outcome)
    return ask(store.home, outcome, plan.approval_minutes, screen.note)


def _run_as_prefect_tasks(engine: Engine, screen: Screen) -> dict[str, Artifact]:
    """Run the plan's steps in order, each as a Prefect task."""

    connect(engine)
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
            message = f"Prefect did not let it run ({state.name}: {one_line(state.message)}); the same command goes on"
            raise StepFailed(step.name, message, engine.log_of(step))
    return {step.name: artifacts[step.name] for step in engine.plan.steps}


def catalog_flow(pipeline: str, options: RunOptions) -> Flow[..., Any]:
    """The flow of a pipeline as deployments run it: it plans with the parameters it is given, then runs."""
    from flows.catalog import compile_flow

    def body(values: Mapping[str, Any]) -> Any:

        params = dict(values)
        dry_run = bool(params.pop("dry_run", False))
        run_options = replace(
            options,
            from_step=params.pop("from_step", None),
            to_step=params.pop("to_step", None),
            force=tuple(params.pop("force", None) or ()),
        )
        try:
            plan, store = plan_run(pipeline, params, run_options)
        except UserError as error:
            return Failed(message=str(error))
        if dry_run:
            Screen(plan, store).show_plan(nothing_runs=True)
            num_to_run = len(plan.steps) - plan.num_reused
            return Completed(
                name="Planned", message=f"nothing was run: {plan.num_reused} steps reused, {num_to_run} to run"
            )
        return run_as_tasks(plan, store, run_options.on_event, [], whole=run_options.to_step is None)

    return compile_flow(pipeline_of(load_spec(options.file), pipeline), pipeline, body)
