"""The plan: which steps, in which order, under which keys, reused or not and why. Pure: it writes and runs nothing.

A step's key depends on its address, settings, input keys, code, seed, device and, for measuring steps, the machine. The
key is known before anything runs, because an input enters by its key. When a key is not in the store, the plan says
what differs from the last time a step of that name was made in that pipeline.

The key parts of each step when it was last made, so that a plan can name changes: `home/steps/PIPELINE/STEP.json`.

These files only explain: keys and artifacts do not depend on them. A file that is lost or broken reads as "never run".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from components.contract import Artifact, Machine, UserError
from components.machine import describe_machine
from flows.planning import fingerprint
from flows.planning.device import resolve_device
from flows.planning.external_inputs import Sources, registry_names
from flows.planning.wiring import PACKAGES, WiredStep, Wiring, wire
from flows.spec.diagnostics import Problems, did_you_mean, one_line
from flows.spec.params import resolve_params
from flows.spec.placement import HERE, RunsOn
from flows.spec.schema import Spec, pipeline_of
from storage.artifacts.store import Store
from storage.artifacts.whole_files import replace_file

MAX_REASONS = 3


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan.

    name:     "draft[eagle3]"; unique in the plan.
    uses:     its address, "drafts.train_draft".
    kind:     the kind it makes, a name in contract.KINDS.
    settings: resolved, defaults included, JSON values.
    inputs:   parameter -> name(s) of the steps, or outside references ("store:KEY"), that fill it.
    key:      names the artifact. reused: it is in the store, whole. reason: why it runs, or why not.
    measures: it runs alone on its machine, and its key depends on the machine.
    runs_on:  here, or the cluster that carries its shards; not part of the key, since the bytes are the same.
    parts:    what went into the key (see fingerprint.Parts), for `draftsmith plan` to compare next time.
    """

    name: str
    uses: str
    kind: str
    settings: dict[str, Any]
    inputs: dict[str, str | list[str]]
    key: str
    reused: bool
    reason: str
    measures: bool = False
    retries: int = 0
    timeout_minutes: float | None = None
    seed: int = 0
    device: str = "cpu"
    line: int = 0
    forced: bool = False
    runs_on: RunsOn = HERE
    parts: dict[str, Any] = field(default_factory=dict)

    def input_names(self) -> list[str]:
        """All names in `inputs`, flat."""
        return [name for value in self.inputs.values() for name in (value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Plan:
    """All steps in an order in which they can run.

    sources: outside references used as inputs. skipped: (step, reason) that `if:` or --from/--to left out.
    approval_minutes: how long a person has to say yes before `champion` moves; None: the promotion gate decides alone.
    remote_code: models whose own Python code may run in its steps.
    """

    pipeline: str
    params: dict[str, Any]
    steps: tuple[PlannedStep, ...]
    sources: dict[str, Artifact] = field(default_factory=dict)
    skipped: tuple[tuple[str, str], ...] = ()
    machine: Machine | None = None
    device: str = "cpu"
    seed: int = 0
    file: str = "pipelines.yaml"
    packages: tuple[str, ...] = PACKAGES
    approval_minutes: float | None = None
    remote_code: tuple[str, ...] = ()

    def step(self, name: str) -> PlannedStep:
        """The step of this name."""
        return next(step for step in self.steps if step.name == name)

    @property
    def digest(self) -> str:
        """sha256 of the pipeline as it was written, parameters filled in: it tells two versions of a pipeline apart."""
        written = [[step.name, step.uses, step.settings, step.inputs] for step in self.steps]
        return fingerprint.key_of({"pipeline": self.pipeline, "params": self.params, "steps": written})

    @property
    def num_reused(self) -> int:
        """How many steps need not run."""
        return sum(step.reused for step in self.steps)


def make_plan(
    spec: Spec,
    pipeline: str,
    params: Mapping[str, Any] | None = None,
    *,
    store: Store,
    machine: Machine | None = None,
    device: Literal["auto"] | str = "auto",
    seed: int = 0,
    from_step: str | None = None,
    to_step: str | None = None,
    force: tuple[str, ...] = (),
    packages: tuple[str, ...] = PACKAGES,
    past: Mapping[str, str] | None = None,
) -> Plan:
    """Work out what a run of `pipeline` with `params` would do.

    past: name -> key of what a past run used and made (flows/analysis/remeasure.py). Outside inputs, and steps
    before the
    first that measures, are then reused as they were, whatever has changed since; the others are planned as always.

    Raises:
        UserError: one line for each thing that is wrong with the pipeline, its parameters or the options.
    """
    declared = pipeline_of(spec, pipeline)
    values = resolve_params(pipeline, declared.params, params or {})
    device = resolve_device(device)
    machine = machine or describe_machine(device)
    sources = Sources(store, past or {})
    wiring = wire(spec, pipeline, values, device=device, outside=sources.kind_of, packages=packages)
    forced = _with_followers(wiring, _select(wiring, force, "--force"))
    selected, left_out = _select_range(wiring, from_step, to_step)
    facts = {"seed": seed, "device": device, "machine": machine, "packages": packages}
    past_parts = _past_parts(wiring, store, past or {})
    parts = _parts_of_all(wiring, sources.artifacts, spec.name, facts, past_parts)
    history = StepHistory(store.home, pipeline)
    planned = {
        step.name: _plan_step(step, parts[step.name], store, history, forced, seed=seed, device=device)
        for step in wiring.steps
    }
    _require_present(wiring, planned, selected, from_step)
    return Plan(
        pipeline=pipeline,
        params=values,
        steps=tuple(step for name, step in planned.items() if name in selected),
        sources=sources.artifacts,
        skipped=wiring.skipped + tuple((name, left_out) for name in planned if name not in selected),
        machine=machine,
        device=device,
        seed=seed,
        file=spec.name,
        packages=packages,
        approval_minutes=declared.approval.within_minutes if declared.approval is not None else None,
        remote_code=(*declared.trust_remote_code, *_models_with_code(wiring)),
    )


def _models_with_code(wiring: Wiring) -> list[str]:
    """The models that the pipeline loads with their own code."""
    loads = (step.settings for step in wiring.steps if step.function.address == "targets.load_target")
    return sorted({str(settings["model"]) for settings in loads if settings["trust_remote_code"]})


def _past_parts(wiring: Wiring, store: Store, past: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Key parts of the steps reused from a past run, as far as the store still has them."""
    measured = _with_followers(wiring, {step.name for step in wiring.steps if step.function.measures})
    past_parts: dict[str, dict[str, Any]] = {}
    for step in wiring.steps:
        if step.name in past and step.name not in measured and store.probe(past[step.name]).artifact is not None:
            past_parts[step.name] = dict(store.record_of(past[step.name])["record"]["parts"])
    return past_parts


def _parts_of_all(
    wiring: Wiring,
    sources: Mapping[str, Artifact],
    file: str,
    facts: Mapping[str, Any],
    past_parts: Mapping[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Key parts of every step, inputs before the steps that use them."""
    problems = Problems(file)
    parts: dict[str, dict[str, Any]] = {}
    keys = {name: artifact.key for name, artifact in sources.items()}
    words = {name: registry_names(artifact) for name, artifact in sources.items()}
    for step in wiring.steps:
        words[step.name] = step.registry_names().union(*(words.get(name, frozenset()) for name in step.input_names()))
        try:
            parts[step.name] = past_parts.get(step.name) or fingerprint.parts_of(step, keys, words[step.name], **facts)
            keys[step.name] = fingerprint.key_of(parts[step.name])
        except UserError as error:
            problems.add(step.line, f"step '{step.name}': {one_line(error)}")
            keys[step.name] = ""
    problems.stop()
    return parts


def _plan_step(
    step: WiredStep,
    parts: dict[str, Any],
    store: Store,
    history: StepHistory,
    forced: set[str],
    *,
    seed: int,
    device: str,
) -> PlannedStep:
    key = fingerprint.key_of(parts)
    state = store.probe(key)
    reused = state.artifact is not None and step.name not in forced
    return PlannedStep(
        name=step.name,
        uses=step.function.address,
        kind=step.function.kind.__name__,
        settings=step.settings,
        inputs=step.inputs,
        key=key,
        reused=reused,
        reason="reused" if reused else _reason(step.name, parts, state.fault, history, forced),
        measures=step.function.measures,
        retries=step.retries,
        timeout_minutes=step.timeout_minutes,
        seed=seed,
        device=device,
        line=step.line,
        forced=step.name in forced,
        runs_on=step.runs_on,
        parts=parts,
    )


def _select(wiring: Wiring, names: tuple[str, ...], option: str) -> set[str]:
    """Step names that match; a name without its [matrix] part takes all of them."""
    selected: set[str] = set()
    for name in names:
        matches = {step.name for step in wiring.steps if name in (step.name, step.base)}
        if not matches:
            valid_names = [step.name for step in wiring.steps] + sorted({step.base for step in wiring.steps})
            raise UserError(f"{option} {name}: there is no such step{did_you_mean(name, dict.fromkeys(valid_names))}")
        selected |= matches
    return selected


def _with_followers(wiring: Wiring, names: set[str]) -> set[str]:
    """These steps and every step that depends on them (steps are in topological order)."""
    grown = set(names)
    for step in wiring.steps:
        if grown.intersection(step.input_names()):
            grown.add(step.name)
    return grown


def _with_needs(wiring: Wiring, names: set[str]) -> set[str]:
    """These steps and every step that they depend on."""
    grown = set(names)
    for step in reversed(wiring.steps):
        if step.name in grown:
            grown.update(step.input_names())
    return grown & {step.name for step in wiring.steps}


def _select_range(wiring: Wiring, from_step: str | None, to_step: str | None) -> tuple[set[str], str]:
    """Steps inside --from and --to (with what they need from the store), and why the rest is left out."""
    if not wiring.steps:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in wiring.skipped[:MAX_REASONS])
        raise UserError(f"nothing to run: every step is left out, {reasons}")
    selected = {step.name for step in wiring.steps}
    options = []
    if from_step is not None:
        selected &= _with_needs(wiring, _with_followers(wiring, _select(wiring, (from_step,), "--from")))
        options.append(f"--from {from_step}")
    if to_step is not None:
        selected &= _with_needs(wiring, _select(wiring, (to_step,), "--to"))
        options.append(f"--to {to_step}")
    if not selected:
        raise UserError(f"{' '.join(options)}: no step lies between them")
    return selected, " ".join(options)


def _require_present(
    wiring: Wiring, planned: Mapping[str, PlannedStep], selected: set[str], from_step: str | None
) -> None:
    """With --from, what stands before that step must be in the store already."""
    if from_step is None:
        return
    started = _with_followers(wiring, _select(wiring, (from_step,), "--from"))
    for name, step in planned.items():
        if name in selected and name not in started and not step.reused:
            reason = f"step '{name}' before it would have to run ({step.reason})"
            raise UserError(f"--from {from_step}: {reason}; leave --from out")


def _reason(name: str, parts: Mapping[str, Any], why_not: str, history: StepHistory, forced: set[str]) -> str:
    """Why a step runs."""
    if name in forced:
        return "forced"
    if why_not != "absent":
        return f"broken: {why_not}"
    last = history.last(name)
    if last is None:
        return "new: never run"
    changes = fingerprint.changes(last, parts)
    if not changes:
        return "gone: it is not in the store any more"
    more = len(changes) - MAX_REASONS
    return "; ".join(changes[:MAX_REASONS]) + (f"; and {more} more" if more > 0 else "")


class StepHistory:
    """The last record of every step of one pipeline."""

    def __init__(self, home: Path, pipeline: str) -> None:
        self.folder = home / "steps" / pipeline

    def last(self, step: str) -> dict[str, Any] | None:
        """The parts of the key of the last artifact made or reused under this name."""
        try:
            content = json.loads((self.folder / f"{step}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return dict(content) if isinstance(content, dict) else None

    def remember(self, step: str, parts: Mapping[str, Any]) -> None:
        """Note what went into the key of an artifact that is now in the store."""
        if self.last(step) == dict(parts):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{step}.json", json.dumps(parts))
