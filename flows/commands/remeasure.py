"""`draftsmith remeasure`: a finished release is measured again, on its own drafters and prompts.

Nothing is trained and no data are made: the plan is that of the run that made the release, with its parameters, seed
and device, in which every step that measures on a machine is forced, with what decides by it (the policy, the verdict,
the release, the page). What stands before is taken as it was in that run, whatever has changed in code or data since,
and must be in the store. So the same release gets another session (storage/artifacts/sessions.py), or, where the
code that measures has changed, a release of its own. Which artifact every name of the past run stood for is read from
the journals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from components.contract import Release, UserError
from components.speedup.comparison.promotion_rule import judge
from flows.commands.inspect import is_model
from flows.commands.run_output import Display, last_of, print_run_summary
from flows.commands.terminal import DEFAULT_FILE, File, Invocation, echo, out
from flows.execution.engine import OnEvent
from flows.execution.local_run import RunOutcome, execute
from flows.planning import fingerprint
from flows.planning.plan import Plan, PlannedStep, RunOptions, make_plan
from flows.spec.references import NAMED_VERSION
from flows.spec.schema import load_spec
from storage import journal
from storage.artifacts.store import Store, default_home, require_writable
from storage.registry.registry import find_release, versions_of


def remeasure(
    release: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS, NAME@VERSION or the start of a Release's key.")],
    file: File = DEFAULT_FILE,
) -> None:
    """Measure a finished release again. Nothing is trained; its evidence is added to, and the gate decides anew."""
    options = RunOptions(file=file, packages=Invocation.packages)
    again = plan_remeasurement(release, options)
    require_writable(options.home or default_home())
    to_run, reused = len(again.plan.steps) - again.plan.num_reused, again.plan.num_reused
    echo(f"{again.plan.pipeline}: {to_run} steps to measure and decide again, {reused} inputs as they were")
    for note in again.notes:
        echo(note)
    with Display(out, max(len(step.name) for step in again.plan.steps)) as display:
        outcome = run_remeasurement(again, display.on_event)
    print_run_summary(outcome, out)
    print_remeasurement(again.before, outcome, out)


@dataclass(frozen=True)
class Remeasurement:
    """The plan of a remeasurement. before: the release's facts until now; notes: remarks for the user."""

    plan: Plan
    store: Store
    before: Mapping[str, Any]
    notes: tuple[str, ...]


def plan_remeasurement(reference: str, options: RunOptions) -> Remeasurement:
    """Find a release and plan its measurements anew.

    reference: NAME (its challenger, else the newest version), NAME@ALIAS, NAME@VERSION, or the start of a key.
    options: file, home and packages count; parameters, seed and device are those of the run that made the release.

    Raises:
        UserError: there is no such release, what it was made of is gone, or its pipeline is not what it was.
    """
    store = Store(options.home)
    key = _find_release(store, reference)
    content = store.record_of(key)
    record = content["record"]
    if content["kind"] != "Release":
        raise UserError(
            f"remeasure {reference}: it is a {content['kind']}, not a Release; `draftsmith show NAME` lists them"
        )
    makes = f"`draftsmith run {record['pipeline']}` makes one of what there is now"
    past = keys_of_run(store, record["run_id"])
    try:
        as_then = replace(
            options, device=record["device"], seed=record["seed"], trial=_was_trial(store, record["run_id"])
        )
        plan = make_plan(load_spec(options.file), record["pipeline"], record["params"], as_then, store, past)
    except UserError as error:
        raise UserError(f"remeasure {reference}: its pipeline is not what it was: {error}; {makes}") from error
    release = next((step for step in plan.steps if step.name == record["step"] and step.kind == "Release"), None)
    if release is None:
        raise UserError(
            f"remeasure {reference}: pipeline '{plan.pipeline}' has no step '{record['step']}' any more; {makes}"
        )
    again = _steps_to_repeat(plan, release)
    if not again:
        raise UserError(f"remeasure {reference}: no step before it measures on a machine")
    needed = {name for step in plan.steps if step.name in again for name in step.input_names()} - again
    for step in plan.steps:
        if step.name in needed and (not step.reused or step.collected):
            raise UserError(f"remeasure {reference}: step '{step.name}' would have to run ({step.reason}); {makes}")
    kept = [step for step in plan.steps if step.name in again | needed]
    steps = [
        replace(step, forced=True, reused=False, reason="measured again") if step.name in again else step
        for step in kept
    ]
    left_out = tuple((step.name, "not measured") for step in plan.steps if step.name not in again | needed)
    notes = () if release.key == key.partition(".")[0] else (_explain_change(store, steps, past),)
    return Remeasurement(replace(plan, steps=tuple(steps), skipped=left_out), store, content["info"], notes)


def run_remeasurement(again: Remeasurement, on_event: OnEvent) -> RunOutcome:
    """Measure, and keep everything as a run does: journal, MLflow, history, registry."""
    return execute(again.plan, again.store, on_event, how="remeasure")


def _find_release(store: Store, reference: str) -> str:
    """The key of the release that was named."""
    version = NAMED_VERSION.fullmatch(reference)
    if version is not None:
        return find_release(store.home, version["name"], version["which"], judge)[0]
    if not is_model(store.home, reference):
        return store.resolve(reference)
    versions = versions_of(store.home, reference)
    chosen_version = next((number for number, aliases, _ in versions if "challenger" in aliases), versions[-1][0])
    return find_release(store.home, reference, str(chosen_version), judge)[0]


def _steps_to_repeat(plan: Plan, release: PlannedStep) -> set[str]:
    """Steps that measure what the release says, those that decide by them, and the pages that show it."""
    behind = {release.name}
    for step in reversed(plan.steps):
        if step.name in behind:
            behind.update(step.input_names())
    again = set[str]()
    for step in plan.steps:
        if step.name in behind and (step.measures or again.intersection(step.input_names())):
            again.add(step.name)
    reused = {step.name for step in plan.steps if step.reused}
    for step in plan.steps:
        names = set(step.input_names())
        if step.uses.startswith("report.") and names & again and names <= again | reused | plan.sources.keys():
            again.add(step.name)
    return again if release.name in again else set()


def _explain_change(store: Store, steps: Sequence[PlannedStep], past: Mapping[str, str]) -> str:
    """A line that says why it will be a release of its own: what has changed about the first step that differs."""
    for step in steps:
        state = store.probe(past.get(step.name, ""))
        if step.forced and step.key != past.get(step.name) and state.artifact is not None:
            parts = store.record_of(past[step.name])["record"]["parts"]
            changes = "; ".join(fingerprint.changes(parts, step.parts)[:3])
            return f"it becomes a release of its own, since step '{step.name}' is not what it was: {changes}"
    return "it becomes a release of its own: what measures it is not what it was"


def keys_of_run(store: Store, run_id: str) -> dict[str, str]:
    """Name of a step or an outside input -> key, in one run; what it took over from earlier runs is looked up in those.

    Raises:
        UserError: the run has no journal here.
    """
    keys: dict[str, str] = {}
    pipeline = None
    waiting, visited = [run_id], set[str]()
    while waiting:
        current = waiting.pop(0)
        file = store.home / "runs" / f"{current}.jsonl"
        if current in visited or not file.is_file():
            continue
        visited.add(current)
        entries = journal.read(file)
        start = journal.first(entries, "run") or {}
        pipeline = pipeline or start.get("pipeline")
        if start.get("pipeline") != pipeline:
            continue
        for step in (entry for entry in entries if entry["entry"] == "step" and entry["key"]):
            keys.setdefault(step["step"], step["key"])
            for pairs in step["inputs"].values():
                for name, key in pairs:
                    keys.setdefault(name, key)
            made_in = _run_that_made(store, step["key"]) if step["status"] == "reused" else None
            waiting += [made_in] if made_in else []
    if not keys:
        raise UserError(
            f"{store.home / 'runs' / run_id}.jsonl is gone: what that run was made of is not known any more"
        )
    return keys


def _was_trial(store: Store, run_id: str) -> bool:
    file = store.home / "runs" / f"{run_id}.jsonl"
    return file.is_file() and journal.is_trial(journal.read(file))


def _run_that_made(store: Store, key: str) -> str | None:
    """The run that has made an artifact, as far as the store knows."""
    try:
        return str(store.record_of(key)["record"].get("run_id", "")) or None
    except (OSError, ValueError):
        return None


def print_remeasurement(before: Mapping[str, Any], outcome: RunOutcome, console: Console) -> None:
    """Print a release's evidence before and after remeasuring, and the registry's decision.

    before: the facts of the release until now.
    """
    now = last_of(outcome, Release)
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
