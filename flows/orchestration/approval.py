"""PREFECT: a person says yes or no in the UI before `champion` moves; silence is a no, and the run still completes.

Everything is made, measured and registered before the question is asked, so nothing waits for the answer but the alias.
The run pauses with a form and a comparison of the new version with the champion. A run on a temporary server has no
UI to answer in: it says how to promote by hand.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_client, pause_flow_run
from prefect.context import FlowRunContext
from prefect.exceptions import FlowPauseTimeout
from prefect.input import RunInput
from prefect.states import Running
from pydantic import Field

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from components.tables import Table
from flows.execution.local_run import RunOutcome
from flows.orchestration.notifications import Happened
from storage.registry.fact_tags import tags_of
from storage.registry.promotion_gate import Decision
from storage.registry.registry import promote
from storage.registry.tracking import open_client

SECONDS_BETWEEN_LOOKS = 3
# (fact of a version, what people call it)
COMPARED = (
    ("speedup_meas", "measured speedup"),
    ("meas_lo", "at least (95 %)"),
    ("meas_hi", "at most (95 %)"),
    ("speedup_pred", "predicted speedup"),
    ("al_meas", "tokens a round"),
    ("depth_k", "draft depth"),
    ("verdict", "verdict"),
    ("draft_key", "drafter"),
)


@dataclass(frozen=True)
class Question:
    """A version that passed the gate and waits for a yes. tags: its facts, and those of the champion ({}: none yet)."""

    name: str
    version: int
    decision: Decision
    tags: dict[str, str]
    champion_tags: dict[str, str]


def questions(home: Path, outcome: RunOutcome) -> list[Question]:
    """The versions of this run that the gate has passed and that only want an approval."""
    waiting = [version for version in outcome.registered if version.waits]
    if not waiting:
        return []

    client = open_client(home)

    def facts(name: str, version: int | None) -> dict[str, str]:
        return tags_of(client, name, version) if version is not None else {}

    return [
        Question(v.name, v.version, v.decision, facts(v.name, v.version), facts(v.name, v.decision.against))
        for v in waiting
    ]


def comparison(question: Question, minutes: float) -> str:
    """New version and champion side by side, and the gate's checks, as Markdown. minutes: how long it waits."""
    new, old, against = question.tags, question.champion_tags, question.decision.against
    rows = [
        [label, _format_fact(new, fact), _format_fact(old, fact)]
        for fact, label in COMPARED
        if f"draftsmith.{fact}" in new or f"draftsmith.{fact}" in old
    ]
    before = f"champion: version {against}" if against is not None else "no champion yet"
    table = Table(["", f"version {question.version}", before], rows).markdown()
    checks = "\n".join(f"- {'passed' if c.passed else 'FAILED'}: {c.summary()}" for c in question.decision.checks)
    return f"## Promote {question.name} version {question.version}?\n\n{table}\n### promotion gate\n\n{checks}\n\n" + (
        "Switch `promote` on to make it the champion; who and why go to the promotion log. "
        f"Without an answer within {minutes:g} minutes it is not promoted."
    )


def ask(home: Path, outcome: RunOutcome, minutes: float, say: Callable[[str], None]) -> Happened:
    """Pause this flow run for each question and act on the answer; returns what came of each, with its line.

    say: receives one line when the run starts to wait.
    """
    happened: Happened = []
    for question in questions(home, outcome):
        what = f"{question.name} version {question.version}"
        say(f"{what} passed the gate and waits for an approval in the Prefect UI, at most {minutes:g} minutes")
        try:
            answer = _pause(question, minutes)
        except FlowPauseTimeout:
            _resume_run()
            line = f"{what} was not promoted: nobody answered within {minutes:g} minutes; {by_hand(question)}"
            happened.append(("refused", line))
            continue
        if not answer.promote:
            line = f"{what} was not promoted: refused in the Prefect UI{_approval_reason(answer)}"
            happened.append(("refused", line))
            continue
        happened.append(_promote(home, question, answer))
    return happened


def unasked(home: Path, outcome: RunOutcome) -> list[str]:
    """The lines of a run without a UI to ask in."""
    return [
        f"{q.name} version {q.version} passed the gate; this pipeline wants an approval: {by_hand(q)}"
        for q in questions(home, outcome)
    ]


def by_hand(question: Question) -> str:
    """The command that does what the answer yes would have done."""
    return f"`draftsmith promote {question.name} --version {question.version} --why ...` promotes it"


def _promote(home: Path, question: Question, answer: Any) -> tuple[str, str]:
    try:
        reason = f"approved in the Prefect UI{_approval_reason(answer)}"
        return "promoted", promote(home, question.name, question.version, reason, judge=judge).note
    except UserError as error:  # the champion has changed meanwhile, and the gate now says no
        return "refused", f"{question.name} version {question.version} was approved but not promoted: {error}"


def _pause(question: Question, minutes: float) -> Any:
    """Pause this run with the form; the answer has `promote` (yes or no), `who` and `why`."""

    class Approval(RunInput):
        promote: bool = Field(default=False, description="Make this version the champion.")
        who: str = Field(default="", description="Your name, for the promotion log.")
        why: str = Field(default="", description="The reason, for the promotion log.")

    form = Approval.with_initial_data(description=comparison(question, minutes), promote=False, who="", why="")
    key = f"promote-{question.name}-{question.version}"
    seconds = max(2, round(60 * minutes))
    return pause_flow_run(wait_for_input=form, timeout=seconds, poll_interval=SECONDS_BETWEEN_LOOKS, key=key)


def _resume_run() -> None:
    """Back to Running: a run that ends while its pause has run out would be called Failed by the server."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "asked inside a flow run"
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(context.flow_run.id, Running(message="nobody answered"), force=True)


def _approval_reason(answer: Any) -> str:
    who = " ".join(str(answer.who).split())[:100] or f"somebody, for {getpass.getuser()}"
    reason = " ".join(str(answer.why).split())[:300]
    return f" by {who}" + (f": {reason}" if reason else "")


def _format_fact(tags: dict[str, str], fact: str) -> str:
    value = tags.get(f"draftsmith.{fact}", "-")
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value[:12] if fact.endswith("_key") else value.replace("_", " ")
