"""What a run prints: a line when a step ends, how long the current one still takes, and the summary at the end.

On a terminal a progress bar; into a file or a pipe plain lines, at most one in ten seconds for each step.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from components.contract import Artifact, DepthPolicy, Measurements, Page, Prompts, Release
from components.data.sources.python_stdlib import STDLIB
from components.report.summary import summarise
from components.rows import NAMES_OF_CHANGES
from components.tables import duration
from flows.execution.local_run import RunOutcome
from flows.execution.messages import Event
from flows.planning.plan import PlannedStep

SECONDS_BETWEEN_LINES = 10.0
SMALL_TOTAL = 20
"""Below so many parts, one that is half done is told in percent of all."""


class Display:
    """Shows the events of a run. Use it as a context manager; `on_event` may be called from any thread."""

    def __init__(self, console: Console, width: int = 20) -> None:
        self.console, self.width = console, width
        self.bar: Progress | None = None
        self.tasks: dict[str, TaskID] = {}
        self.first: dict[str, tuple[float, float]] = {}  # step -> (time, done) of its first progress event
        self.last_line: dict[str, float] = {}
        self.bad_rows: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def on_event(self, step: PlannedStep, event: Event) -> None:
        """Show one event of the engine or of the step."""
        kind = event["event"]
        if kind == "progress":
            self._progress(step, float(event["done"]), float(event["total"]), str(event["what"]))
        elif kind == "start":
            self.last_line[step.name] = time.monotonic()
            if self.bar is not None:
                self._task(step, "starting")
        elif kind == "reused":
            self._end(step, "reused")
        elif kind == "done":
            self._end(step, f"done in {duration(float(event['seconds']))}")
        elif kind == "nothing_new":
            self._end(step, f"nothing new: {event['message']}")
        elif kind == "failed":
            self._end(step, "failed")
        elif kind == "retry":
            self._line(step, f"failed, trying again: {event['message']}")
        elif kind in ("note", "waiting"):
            self._line(step, str(event["message"]))
        elif kind == "set_aside":
            self.bad_rows[step.name] = self.bad_rows.get(step.name, 0) + 1
            if self.bad_rows[step.name] <= 3:
                self._line(step, f"set aside {event['source']}:{event['line']}: {event['why']}")

    def _progress(self, step: PlannedStep, done: float, total: float, what: str) -> None:
        if self.bar is not None:
            self.bar.update(self._task(step, what), completed=done, total=total or None)
            return
        now = time.monotonic()
        began, at_first = self.first.setdefault(step.name, (now, done))
        if now - self.last_line.get(step.name, began) < SECONDS_BETWEEN_LINES:
            return
        self.last_line[step.name] = now
        rate = (done - at_first) / (now - began) if now > began else 0.0
        remaining = f", {duration((total - done) / rate)} left" if rate > 0 else ""
        part = (
            f"{done / total:.0%}" if total < SMALL_TOTAL and done % 1 else f"{done:,.0f}"
        )  # else 0.6 of 1 is "1 of 1"
        self._line(step, f"{what or 'working'}: {part} of {total:,.0f}{remaining}")

    def _task(self, step: PlannedStep, what: str) -> TaskID:
        assert self.bar is not None
        words = f"{escape(step.name):<{self.width}} {escape(what)}"
        if step.name not in self.tasks:
            self.tasks[step.name] = self.bar.add_task(words, total=None)
        else:
            self.bar.update(self.tasks[step.name], description=words)
        return self.tasks[step.name]

    def _end(self, step: PlannedStep, what: str) -> None:
        if self.bar is not None and step.name in self.tasks:
            self.bar.remove_task(self.tasks.pop(step.name))
        bad = self.bad_rows.pop(step.name, 0)
        rows = f"; {bad} bad {'row' if bad == 1 else 'rows'} set aside" if bad else ""
        self._line(step, what + rows)

    def _line(self, step: PlannedStep, what: str) -> None:
        self.console.print(
            f"{step.name:<{self.width}}  {what}", markup=False, emoji=False, highlight=False, soft_wrap=True
        )


Kind = TypeVar("Kind", bound=Artifact)


def print_run_summary(outcome: RunOutcome, console: Console) -> None:
    """Print the summary of a finished run."""

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    plan = outcome.plan
    if outcome.nothing_new:
        say(f"{plan.pipeline}: nothing new, ended after {duration(outcome.seconds)}: {outcome.nothing_new}")
        for line in outcome.problems:
            say(f"  {'not logged':<18} {line}")
        return
    say(f"{plan.pipeline}: done in {duration(outcome.seconds)}, {plan.num_reused} of {len(plan.steps)} steps reused")
    if plan.num_reused == len(plan.steps):
        say("  nothing new: same inputs, same results; --force runs a step again")
    policy, release = last_of(outcome, DepthPolicy), last_of(outcome, Release)
    pages = [artifact for artifact in outcome.artifacts.values() if isinstance(artifact, Page)]
    uploads = [page for page in pages if "commit_url" in page.info]
    reports = [page for page in pages if page not in uploads]
    places = {"report": str(reports[-1].path / "index.html")} if reports else {}
    for page in uploads:
        suffix = "" if page.info["new_commit"] else ", where it was already"
        places["uploaded to"] = f"{page.info['url']}{suffix}"
    for version in outcome.registered:
        places["registered as"] = (
            f"{version.name} version {version.version} ({', '.join(version.aliases) or 'no alias'})"
        )
    for artifact in outcome.artifacts.values():
        if isinstance(artifact, Measurements) and "drift" in artifact.info:
            places["drift"] = str(artifact.info["drift"])
        if isinstance(artifact, Measurements) and "change_lines" in artifact.info:
            places |= {NAMES_OF_CHANGES[what]: line for what, line in artifact.info["change_lines"].items()}
    if policy is not None:
        places = summarise(policy.info, release.info if release is not None else None, places)
    for label, value in places.items():
        say(f"  {label:<18} {value}")
    registered = [f"{version.name} version {version.version}" for version in outcome.registered]
    for line in outcome.notes:
        if "; " in line or not any(name in line for name in registered):  # else "registered as" has said it
            say(f"  {line}")
    for line in outcome.problems:
        say(f"  {'not logged':<18} {line}")
    if policy is not None:
        say("next:")
        for command in next_commands(policy, release, example_of(outcome)):
            say(f"  {command}")


def last_of(outcome: RunOutcome, kind: type[Kind]) -> Kind | None:
    """The artifact of this kind that was made last."""
    return next((artifact for artifact in reversed(outcome.artifacts.values()) if isinstance(artifact, kind)), None)


def example_of(outcome: RunOutcome) -> str:
    """A prompt to try that is like those of the run: the start of a function, or a request."""
    prompts = last_of(outcome, Prompts)
    is_code = prompts is None or prompts.info.get("source", STDLIB) == STDLIB
    return "def add(a, b):" if is_code else "Write a haiku about rain."


def next_commands(policy: DepthPolicy, release: Release | None, example: str) -> list[str]:
    """Commands worth trying after a run that chose a depth; first of all, where the gate refused, measuring again."""
    key = release.key if release is not None else policy.key
    again = [f"draftsmith remeasure {key[:12]}   # on a quiet machine: adds evidence and decides anew"]
    target = (
        f"starts_with(target_key, '{str(policy.info['target_key'])[:12]}') AND " if "target_key" in policy.info else ""
    )
    refused = release is not None and policy.info.get("gate_passed") is False
    return [
        *(again if refused else []),
        f'draftsmith generate "{example}"',
        'draftsmith query "SELECT method, depth_k, al, speedup_pred, speedup_meas FROM v_depth '
        f"WHERE {target}workload = 'all' ORDER BY ALL\"",
        f"draftsmith show {key[:12]}",
    ]
