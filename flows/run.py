"""PREFECT: one flow around the engine, one task a step, and the artifacts that people look at in the UI.

The engine decides everything (what is reused, which child process, retries); Prefect watches, schedules and remembers.
Its result cache is off: the store is the only cache. A wrong input ends as the state Failed with the one line that says
why, never as a traceback. `prepare` sets Prefect's environment and must come before Prefect is first imported.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from components.contract import Artifact, DepthPolicy, Page, UserError
from components.report.tables import choice_table, depth_table, gate_table
from components.rows import DepthChoice, DepthEval, read_rows
from flows.direct import RunOptions, RunOutcome, execute, plan_run
from flows.engine import Engine, OnEvent, StepFailed
from flows.plan import Plan, PlannedStep
from flows.show_plan import as_mermaid
from flows.spec import load_spec, pipeline_of
from flows.temporary_server import answers, temporary_server
from storage.artifacts import Store

if TYPE_CHECKING:
    from prefect import Flow

SECONDS_BETWEEN_UPDATES = 3.0
DELIVERY_TIMEOUT_S = 20.0
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_CLI_PROMPT": "false",
}


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
        return _run_flow(plan, store, options)
    with temporary_server(Path(os.environ["PREFECT_HOME"])) as server:
        os.environ["PREFECT_API_URL"] = server.url
        try:
            return _run_flow(plan, store, options, ready=server.wait)
        finally:
            _send_the_rest()
            del os.environ["PREFECT_API_URL"]


def _run_flow(plan: Plan, store: Store, options: RunOptions, ready: Callable[[], None] | None = None) -> RunOutcome:
    """Compile the plan's pipeline, wait until its server is ready, run the flow in this process."""
    from flows.catalog import compile_flow

    ended: list[RunOutcome | BaseException] = []

    def body(given: Mapping[str, Any]) -> Any:
        return run_as_tasks(plan, store, options.on_event, ended)

    compiled = compile_flow(pipeline_of(load_spec(options.file), plan.pipeline), plan.pipeline, body)
    if ready is not None:
        ready()
    form = {"from_step": options.from_step, "to_step": options.to_step, "force": list(options.force)}
    compiled(**plan.params, **form, return_state=True)
    assert ended, "Prefect ran the flow without running its body"
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def _send_the_rest() -> None:
    """Deliver the logs and events in Prefect's queues; once its server has stopped they are retried for a minute."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=DELIVERY_TIMEOUT_S)


def prepare(home: Path) -> str:
    """Set Prefect's environment: quiet, no telemetry; returns the URL of the server that answers, "" for none."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the terminal has our own progress
    place = Path(os.environ.setdefault("PREFECT_HOME", str(home / "prefect")))
    place.mkdir(parents=True, exist_ok=True)
    url = os.environ.get("PREFECT_API_URL", "")
    if url and answers(url):
        return url
    if url:
        sys.stderr.write(f"no Prefect server answers at {url}: this run uses a temporary one\n")
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    return ""


def run_as_tasks(plan: Plan, store: Store, on_event: OnEvent | None, ended: list[RunOutcome | BaseException]) -> Any:
    """The body of every flow: each step of the plan is a task; returns the flow's final state.

    ended: what became of the run is put here, for a caller in the same process.
    """
    from prefect.states import Completed, Failed

    screen = _Screen(plan)
    screen.show_plan()

    def told(step: PlannedStep, event: Mapping[str, Any]) -> None:
        screen.on_event(step, event)
        if on_event is not None:
            on_event(step, event)

    try:
        outcome = execute(plan, store, told, how="prefect", drive=lambda engine: _drive(engine, screen))
    except (UserError, StepFailed) as error:
        ended.append(error)
        return Failed(message=str(error))
    except BaseException as error:
        ended.append(error)
        raise
    ended.append(outcome)
    screen.show_outcome(outcome)
    return Completed(message=f"{len(plan.steps)} steps, {len(screen.reused)} of them reused")


def _drive(engine: Engine, screen: _Screen) -> dict[str, Artifact]:
    """Run the plan's steps in order, each as a Prefect task."""
    from prefect import task
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Completed, Failed

    artifacts: dict[str, Artifact] = dict(engine.plan.sources)
    for step in engine.plan.steps:
        failure: list[Exception] = []

        def body(step: PlannedStep = step, failure: list[Exception] = failure) -> Any:
            try:
                artifact = artifacts[step.name] = engine.run_step(step, artifacts)
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
        as_task(return_state=True)
        if failure:
            raise failure[0]
        assert step.name in artifacts, f"{step.name}: its task ended without running it"
    return {step.name: artifacts[step.name] for step in engine.plan.steps}


class _Screen:
    """What the Prefect UI shows of a run besides its tasks: the plan, progress, decisions, links, notes.

    Showing must never fail a run: the first thing that cannot be shown is told on stderr, and no more is tried.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.reused: set[str] = set()
        self._progress: dict[str, UUID] = {}
        self._updated: dict[str, float] = {}
        self._broken = False

    def on_event(self, step: PlannedStep, event: Mapping[str, Any]) -> None:
        """Show one event of the engine or of a step."""
        kind = event["event"]
        if kind == "progress":
            self._try(lambda: self._show_progress(step, event))
        elif kind == "reused":
            self.reused.add(step.name)
        elif kind in ("note", "waiting", "retry", "failed"):
            self._try(lambda: _logger().info("%s: %s", step.name, event["message"]))
        elif kind == "set_aside":
            where = f"{event['source']}:{event['line']}"
            self._try(lambda: _logger().warning("%s: set aside %s: %s", step.name, where, event["why"]))

    def show_plan(self) -> None:
        """The plan as a drawing."""
        about = f"{len(self.plan.steps)} steps, {self.plan.num_reused} reused, on {self.plan.device}"
        self._markdown(
            f"plan-{self.plan.pipeline}", f"{about}\n\n```mermaid\n{as_mermaid(self.plan)}\n```\n", "what runs"
        )

    def show_artifact(self, step: PlannedStep, artifact: Artifact) -> None:
        """The numbers of a decision, the place of a page."""
        if step.name in self._progress:
            self._try(lambda: _update_progress(self._progress[step.name], 100.0))
        if isinstance(artifact, DepthPolicy):
            self._try(lambda: self._show_policy(step, artifact))
        elif isinstance(artifact, Page):
            page = (artifact.path / "index.html").as_uri()
            self._markdown(f"report-{step.name}", f"[{artifact.path / 'index.html'}]({page})", "the report")

    def show_outcome(self, outcome: RunOutcome) -> None:
        """What was registered, what could not be logged."""
        lines = [f"- {line}" for line in (*outcome.notes, *outcome.problems)]
        if lines:
            self._markdown(f"outcome-{self.plan.pipeline}", "\n".join(lines), "worth knowing")

    def _show_policy(self, step: PlannedStep, artifact: Artifact) -> None:
        choices, evals = read_rows(artifact.path, DepthChoice), read_rows(artifact.path, DepthEval)
        parts = [choice_table(choices).markdown()]
        for choice in choices:
            if choice.workload == "all":
                mine = [e for e in evals if e.draft_key == choice.draft_key and e.workload == "all"]
                parts.append(f"### {choice.method}\n\n{depth_table(mine, choice.depth_k).markdown()}")
        gate = json.loads((artifact.path / "policy.json").read_text(encoding="utf-8")).get("gate")
        if gate:
            parts.append(f"### promotion gate\n\n{gate_table(gate).markdown()}")
        self._markdown(f"depth-{step.name}", "\n".join(parts), "how deep to draft, and why")

    def _show_progress(self, step: PlannedStep, event: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._updated.get(step.name, 0.0) < SECONDS_BETWEEN_UPDATES:
            return
        self._updated[step.name] = now
        percent = 100.0 * min(1.0, float(event["done"]) / (float(event["total"]) or 1.0))
        if step.name in self._progress:
            _update_progress(self._progress[step.name], percent)
            return
        from prefect.artifacts import create_progress_artifact

        made = create_progress_artifact(percent, key=_key(f"progress-{step.name}"), description=str(event["what"]))
        assert isinstance(made, UUID)
        self._progress[step.name] = made

    def _markdown(self, key: str, text: str, description: str) -> None:
        def create() -> None:
            from prefect.artifacts import create_markdown_artifact

            create_markdown_artifact(text, key=_key(key), description=description)

        self._try(create)

    def _try(self, show: Callable[[], object]) -> None:
        if self._broken:
            return
        try:
            show()
        except Exception as error:  # Prefect's errors, its HTTP client's and its database's are of many classes
            self._broken = True
            said = " ".join(str(error).split())[:200]
            sys.stderr.write(f"the Prefect UI shows less of this run: {type(error).__name__}: {said}\n")


def catalog_flow(pipeline: str, options: RunOptions) -> Flow[..., Any]:
    """The flow of a pipeline as deployments run it: it plans with the parameters it is given, then runs."""
    from flows.catalog import compile_flow

    def body(given: Mapping[str, Any]) -> Any:
        from dataclasses import replace

        from prefect.states import Failed

        chosen = dict(given)
        narrowed = replace(
            options,
            from_step=chosen.pop("from_step", None),
            to_step=chosen.pop("to_step", None),
            force=tuple(chosen.pop("force", None) or ()),
        )
        try:
            plan, store = plan_run(pipeline, chosen, narrowed)
        except UserError as error:
            return Failed(message=str(error))
        return run_as_tasks(plan, store, narrowed.on_event, [])

    return compile_flow(pipeline_of(load_spec(options.file), pipeline), pipeline, body)


def _update_progress(artifact: UUID, percent: float) -> None:
    from prefect.artifacts import update_progress_artifact

    update_progress_artifact(artifact, percent)


def _key(name: str) -> str:
    """A key that Prefect takes: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _logger() -> Any:
    from prefect import get_run_logger

    return get_run_logger()
