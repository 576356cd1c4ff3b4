"""The summary that ends a run: its result, what could not be logged, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from components.contract import Artifact, DepthPolicy, Measurements, Page, Release
from components.report.summary import summarise
from flows.console.progress import duration
from flows.execution.local_run import RunOutcome

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
    policy, release = _last(outcome, DepthPolicy), _last(outcome, Release)
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
    if policy is not None:
        places = summarise(policy.info, release.info if release is not None else None, places)
    for label, value in places.items():
        say(f"  {label:<18} {value}")
    registered = [f"{version.name} version {version.version}" for version in outcome.registered]
    for line in outcome.notes:
        if not any(name in line for name in registered):  # "registered as" has said it
            say(f"  {line}")
    for line in outcome.problems:
        say(f"  {'not logged':<18} {line}")
    if policy is not None:
        say("next:")
        for command in next_commands(policy, release):
            say(f"  {command}")


def print_remeasurement(before: Mapping[str, Any], outcome: RunOutcome, console: Console) -> None:
    """Print a release's evidence before and after remeasuring, and the registry's decision.

    before: the facts of the release until now.
    """
    now = _last(outcome, Release)
    for what, facts in (("before", before), ("now", now.info if now is not None else {})):
        console.print(f"  {what:<18} {_evidence(facts)}", markup=False, soft_wrap=True)
    for version in outcome.registered:
        console.print(f"  {version.note}", markup=False, soft_wrap=True)
    if now is not None:
        hint = f"draftsmith show {now.key[:12]} lists every session; draftsmith query --all-sessions asks them all"
        console.print(f"  {hint}", markup=False, soft_wrap=True)


def _evidence(facts: Mapping[str, Any]) -> str:
    """One line: drafter, depth, speedup with its interval, the gate."""
    speedup, lo, hi = (facts.get(name) for name in ("speedup_meas", "meas_lo", "meas_hi"))
    measured = "not measured" if speedup is None else f"{speedup:.2f}x"
    interval = f" [{lo:.2f}, {hi:.2f}]" if lo is not None and hi is not None else ""
    gate = "passed" if facts.get("gate_passed") else "refused"
    return f"{facts.get('method')} at depth {facts.get('depth_k')}: {measured}{interval}, own gate {gate}"


def _last(outcome: RunOutcome, kind: type[Kind]) -> Kind | None:
    """The artifact of this kind that was made last."""
    return next((artifact for artifact in reversed(outcome.artifacts.values()) if isinstance(artifact, kind)), None)


def next_commands(policy: DepthPolicy, release: Release | None) -> list[str]:
    """Commands worth trying after a run that chose a depth; first of all, where the gate refused, measuring again."""
    key = release.key if release is not None else policy.key
    again = [f"draftsmith remeasure {key[:12]}   # on a quiet machine: adds evidence and decides anew"]
    refused = release is not None and policy.info.get("gate_passed") is False
    return [
        *(again if refused else []),
        'draftsmith generate "def add(a, b):"',
        'draftsmith query "SELECT method, depth_k, al, speedup_pred, speedup_meas FROM v_depth '
        "WHERE workload = 'all' ORDER BY ALL\"",
        f"draftsmith show {key[:12]}",
    ]


def print_side_by_side(answer: dict[str, Any], console: Console) -> None:
    """Two continuations of one prompt, with their speed."""
    panels = []
    for name in ("plain", "speculative"):
        run = answer[name]
        speed = run["num_tokens"] / (run["ms"] / 1000) if run["ms"] else 0.0
        title = name if name == "plain" else f"{answer['method']}, depth {answer['depth_k']}"
        rounds = "" if name == "plain" else f", {run['rounds']} rounds"
        foot = f"{run['num_tokens']} tokens in {run['ms']:.0f} ms, {speed:.0f} a second{rounds}"
        panels.append(Panel(Text(run["text"]), title=Text(title), subtitle=Text(foot), width=console.width // 2 - 1))
    console.print(Columns(panels))
    plain, fast = answer["plain"]["ms"], answer["speculative"]["ms"]
    same = "the same tokens" if answer["identical"] else "DIFFERENT tokens"
    ratio = f"{plain / fast:.2f} times as fast" if fast else "too short to time"
    console.print(f"{same}, {ratio} in this one run", markup=False, soft_wrap=True)
