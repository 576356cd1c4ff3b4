"""PREFECT: artifacts of a run in the UI, besides its tasks: plan, progress, tables and charts, links, the lock.

An error here never fails a run: it is written to stderr, and after the third nothing more is shown.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from uuid import UUID

from prefect import get_client, get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.concurrency.sync import concurrency
from prefect.runtime import task_run

from components.contract import (
    Artifact,
    Chats,
    Conversations,
    DepthPolicy,
    Measurements,
    Page,
    Prompts,
    Release,
    UserError,
)
from components.data.formats.chats import dropped_examples
from components.report.prefect_cards import (
    answers_card,
    chats_card,
    decision_card,
    measurements_card,
    mix_card,
    page_card,
    verdict_card,
)
from components.tables import Table
from components.text import in_markdown, message_of
from flows.execution.local_run import RunOutcome
from flows.execution.messages import Event, StepFailed
from flows.planning.plan import Plan, PlannedStep
from flows.services.client import mlflow_address, report_address
from storage.artifacts.store import Store

SECONDS_BETWEEN_UPDATES = 3.0
SLOT_TIMEOUT_S = 2.0
MOST_FAULTS = 3


def machine_limit() -> str:
    """The name of the Prefect concurrency limit that shows that a step measures alone on this machine."""
    return f"measuring on {re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())}"


class Screen:
    """Shows one run in the UI. Use its methods from the flow run's own thread, inside the run."""

    def __init__(self, plan: Plan, store: Store, watched: bool = True) -> None:
        """watched: somebody can look while it runs; a server that lives as long as the run shows only what stays."""
        self.plan, self.store, self.watched = plan, store, watched
        self.reused: set[str] = set()
        self._progress: dict[str, UUID] = {}
        self._updated: dict[str, float] = {}
        self._slot: ExitStack | None = None
        self._faults = 0
        self._run_card: UUID | None = None
        self._plan_text = ""

    def on_event(self, step: PlannedStep, event: Event) -> None:
        """Show one event of the engine or of a step."""
        kind = event["event"]
        if kind == "progress":
            self._try(lambda: self._show_progress(step, event))
        elif kind == "reused":
            self.reused.add(step.name)
        elif kind == "start" and step.measures and self.watched:
            self._try(self._take_slot)
        elif kind == "start":
            self.leave_machine()
        elif kind in ("note", "waiting", "retry", "failed"):
            self._try(lambda: get_run_logger().info("%s: %s", step.name, event["message"]))
        elif kind == "set_aside":
            location = f"{event['source']}:{event['line']}"
            self._try(lambda: get_run_logger().warning("%s: set aside %s: %s", step.name, location, event["why"]))
        if kind in ("waiting", "failed"):
            self.leave_machine()

    def leave_machine(self) -> None:
        """No step of this run measures now. Between two that do the slot is kept: handing it over takes seconds."""
        slot, self._slot = self._slot, None
        if slot is not None:
            self._try(slot.close)

    def show_plan(self, *, nothing_runs: bool = False) -> None:
        """The plan as a drawing and, since only a table has room for reasons, as a table."""
        about = f"{len(self.plan.steps)} steps, {self.plan.num_reused} reused, on {self.plan.device}"
        about += f"; {self.plan.cost}" if self.plan.cost else ""
        if nothing_runs:
            about = f"**A dry run: nothing was run.** {about}"
        rows = [[s.name, s.uses, s.kind, s.key[:12], "reused" if s.reused else s.reason] for s in self.plan.steps]
        rows += [[name, "", "", "", f"left out: {reason}"] for name, reason in self.plan.skipped]
        table = Table(["step", "uses", "makes", "key", "why"], rows).markdown()
        drawing = f"```mermaid\n{self.plan.mermaid()}\n```"
        self._plan_text = f"{about}\n\n{drawing}\n\n{table}"
        self._try(self._create_run_card)

    def show_artifact(self, step: PlannedStep, artifact: Artifact) -> None:
        """Tables and charts of what was measured and decided, the place of a page."""
        if step.name in self._progress:
            self._try(lambda: update_progress_artifact(self._progress[step.name], 100.0))
        if isinstance(artifact, DepthPolicy):
            self._markdown(f"decision-{step.name}", lambda: decision_card(artifact), "how deep to draft, and why")
        elif isinstance(artifact, Measurements):
            self._markdown(f"measured-{step.name}", lambda: measurements_card(artifact), "what was measured")
        elif isinstance(artifact, Conversations):
            self._markdown(f"answers-{step.name}", lambda: answers_card(artifact), "what is trained on")
        elif isinstance(artifact, Chats):
            self._markdown(
                f"rows-{step.name}",
                lambda: chats_card(artifact, dropped_examples(artifact.path)),
                "rows kept, and why not",
            )
        elif isinstance(artifact, Prompts):
            self._markdown(f"mix-{step.name}", lambda: mix_card(artifact), "asked and got of the mix")
        elif isinstance(artifact, Page):
            self._markdown(f"report-{step.name}", lambda: self._page_location(artifact), "the report")

    def show_outcome(self, outcome: RunOutcome) -> None:
        """The verdict with its chart, links, what was registered, what could not be logged, above the plan."""
        self._drop_progress()
        policies = [artifact for artifact in outcome.artifacts.values() if isinstance(artifact, DepthPolicy)]
        became = [f"nothing new: {outcome.nothing_new}"] if outcome.nothing_new else []
        # what happened to versions also stands among the notes
        became += dict.fromkeys((*outcome.decided, *outcome.notes, *outcome.problems))
        became += [
            f"{name}: draftsmith show {artifact.key[:12]}"
            for name, artifact in outcome.artifacts.items()
            if isinstance(artifact, Page | Release)
        ]
        links = links_of(self.store, outcome)
        policy = policies[-1] if policies else None
        self._try(lambda: self._update_run_card(verdict_card(policy, became, links), "the verdict, and why"))

    def show_failure(self, error: UserError | StepFailed) -> None:
        """What went wrong and where, and how the run goes on."""
        self._drop_progress()
        lines = [f"## {in_markdown(str(error))}"]
        if isinstance(error, StepFailed):
            lines.append(f"Its log: `{error.log}`")
        lines.append(
            f"`draftsmith run {self.plan.pipeline}`, or Retry above, goes on from the steps that are finished."
        )
        self._try(lambda: self._update_run_card("\n\n".join(lines), "what went wrong"))

    def _drop_progress(self) -> None:
        """Remove the bars of progress: what has ended needs none."""
        bars, self._progress = list(self._progress.values()), {}
        if bars:
            self._try(lambda: _delete_artifacts(bars))

    def note(self, text: str) -> None:
        """One line in the run's log."""
        self._try(lambda: get_run_logger().info("%s", text))

    def _page_location(self, page: Page) -> str:
        """Where the page is: a link where a server shows it; else its file to copy, which no link of a page opens."""
        file = page.path / "index.html"
        verdict = in_markdown(str(page.info.get("verdict", "")).replace("_", " "))
        served = report_address(self.store.home, page.key)
        place = f"[Open the report]({served})" if served else f"Open it in a browser:\n\n```\n{file.as_uri()}\n```"
        place += f"\n\nor `draftsmith show {page.key[:12]}`.\n"
        return "\n\n".join(part for part in (verdict, page_card(page), place) if part)

    def _take_slot(self) -> None:
        """Show that this machine is being measured on. The guard is the engine's OS lock; this only makes it seen."""
        if self._slot is not None:
            return
        name, self._slot = machine_limit(), ExitStack()
        try:
            self._slot.enter_context(
                concurrency(name, timeout_seconds=SLOT_TIMEOUT_S, strict=False, raise_on_lease_renewal_failure=False)
            )
        except TimeoutError:  # still leased to a run that was killed; the server takes it back after five minutes
            get_run_logger().info("the concurrency limit '%s' is taken; the machine's own lock is held", name)

    def _show_progress(self, step: PlannedStep, event: Event) -> None:
        now = time.monotonic()
        if now - self._updated.get(step.name, 0.0) < SECONDS_BETWEEN_UPDATES:
            return
        self._updated[step.name] = now
        percent = 100.0 * min(1.0, float(event["done"]) / (float(event["total"]) or 1.0))
        if step.name in self._progress:
            update_progress_artifact(self._progress[step.name], percent)
            return

        artifact_id = create_progress_artifact(
            percent, key=_key(f"progress-{step.name}"), description=str(event["what"])
        )
        assert isinstance(artifact_id, UUID)
        self._progress[step.name] = artifact_id

    def _create_run_card(self) -> None:
        """Put the plan on the page of the run; what came of it will stand above it."""
        key = _key(f"run-{self.plan.pipeline}")
        created = create_markdown_artifact(self._plan_text, key=key, description="what runs, and why")
        assert isinstance(created, UUID)
        self._run_card = created

    def _update_run_card(self, text: str, description: str) -> None:
        if self._run_card is None:
            return
        changed = ArtifactUpdate(data=f"{text}\n\n### what ran, and why\n\n{self._plan_text}", description=description)
        with get_client(sync_client=True) as client:
            client.update_artifact(self._run_card, changed)

    def _markdown(self, key: str, text: Callable[[], str], description: str) -> None:
        """A card of the running step. It is on the page of its task, and not among the cards of the run.

        Prefect shows those in no order, so the run has one: two dozen hid the one that people want.
        """

        def create() -> None:
            if content := text():
                card = ArtifactCreate(
                    type="markdown",
                    key=_key(key),
                    description=description,
                    data=content,
                    task_run_id=UUID(str(task_run.id)),
                )
                with get_client(sync_client=True) as client:
                    client.create_artifact(card)

        self._try(create)

    def _try(self, show: Callable[[], object]) -> None:
        if self._faults >= MOST_FAULTS:
            return
        try:
            show()
        except Exception as error:  # Prefect's errors, its HTTP client's and its database's are of many classes
            self._faults += 1
            message = message_of(error, 200)
            sys.stderr.write(f"the Prefect UI shows less of this run: {type(error).__name__}: {message}\n")


def links_of(store: Store, outcome: RunOutcome) -> list[tuple[str, str]]:
    """(label, address) of the reports and of the run in MLflow, as far as servers show them."""
    pages = [artifact.key for artifact in outcome.artifacts.values() if isinstance(artifact, Page)]
    links = [("the report", address) for key in pages if (address := report_address(store.home, key))]
    if (mlflow := mlflow_address(store.home)) and outcome.mlflow_run:
        experiment, run = outcome.mlflow_run
        links.append(("numbers, charts and evidence in MLflow", f"{mlflow}/#/experiments/{experiment}/runs/{run}"))
    return links


def _delete_artifacts(artifacts: list[UUID]) -> None:
    with get_client(sync_client=True) as client:
        for artifact in artifacts:
            client.delete_artifact(artifact)


def _key(name: str) -> str:
    """A key that Prefect takes: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
