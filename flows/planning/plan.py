"""The plan: which steps, in which order, under which keys, reused or not and why. Pure: it writes and runs nothing.

A step's key depends on its address, settings, input keys, code, seed, device and, for measuring steps, the machine. The
key is known before anything runs, because an input enters by its key. When a key is not in the store, the plan says
what differs from the last time a step of that name was made in that pipeline.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from components.contract import Artifact, Machine, UserError
from components.files import digest_of_json, write_whole
from components.machine import describe_machine
from components.outside_json import JsonObject
from components.text import did_you_mean, in_mermaid, shorten
from flows.planning import fingerprint
from flows.planning.external_inputs import Sources, kind_of_source, registry_names
from flows.planning.rehearsal import StandIns, rehearsed
from flows.planning.this_machine import resolve_device
from flows.planning.wiring import PACKAGES, WiredStep, Wiring, check_spec, wire
from flows.spec.diagnostics import Problems, page_of_step
from flows.spec.params import parse_params, resolve_params
from flows.spec.placement import HERE, RunsOn
from flows.spec.references import Values, flat
from flows.spec.schema import PipelineSpec, RetentionSpec, Spec, load_spec, pipeline_of
from storage.artifacts.store import Store

MAX_REASONS = 3
PartsByStep = dict[str, fingerprint.KeyParts]


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
    collected: only its record is left (`draftsmith gc`, a deletion), and nothing that runs needs more: it is reused.
    runs_on:  here, or the cluster that carries its shards; not part of the key, since the bytes are the same.
    parts:    what went into the key, for `draftsmith plan` to compare next time.
    """

    name: str
    uses: str
    kind: str
    settings: JsonObject
    inputs: dict[str, str | list[str]]
    key: str
    reused: bool
    reason: str
    parts: fingerprint.KeyParts
    measures: bool = False
    retries: int = 0
    timeout_minutes: float | None = None
    seed: int = 0
    device: str = "cpu"
    line: int = 0
    forced: bool = False
    runs_on: RunsOn = HERE
    collected: bool = False

    def input_names(self) -> list[str]:
        """All names in `inputs`, flat."""
        return flat(self.inputs)


@dataclass(frozen=True)
class Plan:
    """All steps in an order in which they can run.

    sources: outside references used as inputs. skipped: (step, reason) that `if:` or --from/--to left out.
    declared: the pipeline as its file declares it, of which its form in Prefect is made.
    remote_code: models whose own Python code may run in its steps. trial: its releases stay out of the registry.
    retention: what of the home is kept once the run has ended; None: everything. remarks: what a person has to settle
    about its outside inputs, one line each; the run says it as it ends. rehearsed: nobody will use what it measures.
    cost: what the steps to run take, in one line; "" where nothing is said of it.
    """

    pipeline: str
    params: JsonObject
    steps: tuple[PlannedStep, ...]
    sources: dict[str, Artifact] = field(default_factory=dict)
    skipped: tuple[tuple[str, str], ...] = ()
    machine: Machine | None = None
    device: str = "cpu"
    seed: int = 0
    file: str = "pipelines.yaml"
    packages: tuple[str, ...] = PACKAGES
    declared: PipelineSpec | None = None
    remote_code: tuple[str, ...] = ()
    trial: bool = False
    retention: RetentionSpec | None = None
    remarks: tuple[str, ...] = ()
    rehearsed: bool = False
    cost: str = ""

    def step(self, name: str) -> PlannedStep:
        """The step of this name."""
        return next(step for step in self.steps if step.name == name)

    @property
    def digest(self) -> str:
        """sha256 of the pipeline as it was written, parameters filled in: it tells two versions of a pipeline apart."""
        written = [[step.name, step.uses, step.settings, step.inputs] for step in self.steps]
        return digest_of_json({"pipeline": self.pipeline, "params": self.params, "steps": written})

    @property
    def approval_minutes(self) -> float | None:
        """How long a person has to say yes before `champion` moves; None: the promotion gate decides alone."""
        approval = self.declared.approval if self.declared is not None else None
        return approval.within_minutes if approval is not None else None

    @property
    def num_reused(self) -> int:
        """How many steps need not run."""
        return sum(step.reused for step in self.steps)

    def mermaid(self) -> str:
        """The plan as a Mermaid flowchart; what would run is drawn with a thick border."""
        ids = {name: f"n{number}" for number, name in enumerate([*self.sources, *(step.name for step in self.steps)])}
        lines = ["flowchart LR"]
        lines += [f'  {ids[name]}[("{in_mermaid(name)}")]' for name in self.sources]
        for step in self.steps:
            label = "reused" if step.reused else in_mermaid(step.reason)
            lines.append(f'  {ids[step.name]}["{in_mermaid(step.name)}<br/><small>{step.kind}: {label}</small>"]')
            if not step.reused:
                lines.append(f"  style {ids[step.name]} stroke-width:3px")
        for step in self.steps:
            lines += [f"  {ids[name]} --> {ids[step.name]}" for name in step.input_names() if name in ids]
        return "\n".join(lines)


@dataclass(frozen=True)
class RunOptions:
    """How to run, apart from pipeline and parameters; the same for Prefect and for `--direct`.

    trial: the release of this run stays out of the registry; everything else is kept as ever.
    online: a person lets its steps reach hubs.
    """

    file: Path = Path("pipelines.yaml")
    home: Path | None = None
    device: str = "auto"
    seed: int = 0
    from_step: str | None = None
    to_step: str | None = None
    force: tuple[str, ...] = ()
    packages: tuple[str, ...] = PACKAGES
    trial: bool = False
    online: bool = False


Refused = Callable[[Path, Values, str], None]
"""Receives the home, the parameters and the reason of a run that cannot be planned."""


def plan_run(
    pipeline: str,
    params: Values | Sequence[str],
    options: RunOptions,
    on_refusal: Refused | None = None,
    require_allowed: Callable[[PipelineSpec], None] | None = None,
) -> tuple[Plan, Store]:
    """The plan of a run and the store it works on.

    params: values by name, or texts NAME=VALUE as the command line has them. on_refusal: hears of a pipeline that is
    there and cannot be planned, before the error is raised. require_allowed: raises UserError for one that may not run.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    store, spec = Store(options.home), load_spec(options.file)
    if not isinstance(params, Mapping):
        params = parse_params(pipeline, pipeline_of(spec, pipeline).params, params)
    try:
        if require_allowed is not None:
            require_allowed(pipeline_of(spec, pipeline))
        return make_plan(spec, pipeline, params, options, store), store
    except UserError as error:
        if on_refusal is not None:
            on_refusal(store.home, params, "; ".join(str(error).splitlines()))
        raise


def plan_rehearsal(
    pipeline: str, params: Sequence[str], options: RunOptions, rehearsals: Store, stand_ins: StandIns
) -> Plan:
    """The plan of a rehearsal (flows/planning/rehearsal.py), whose artifacts go into a store of their own.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    spec = load_spec(options.file)
    values = parse_params(pipeline, pipeline_of(spec, pipeline).params, params)
    return make_plan(spec, pipeline, values, options, Store(options.home), rehearsal=(rehearsals, stand_ins))


def check_file(file: Path, store: Store, packages: tuple[str, ...]) -> dict[str, Wiring]:
    """Every pipeline of a file, wired with its default parameters; no service is asked.

    Raises:
        UserError: one line for each thing that is wrong with any of them.
    """
    return check_spec(load_spec(file), outside=lambda name: kind_of_source(name, store), packages=packages)


def make_plan(
    spec: Spec,
    pipeline: str,
    params: Values,
    options: RunOptions,
    store: Store,
    past: Mapping[str, str] | None = None,
    rehearsal: tuple[Store, StandIns] | None = None,
) -> Plan:
    """Work out what a run of `pipeline` with `params` would do; of the options, file and home have been opened.

    past: name -> key of what a past run used and made (flows/commands/remeasure.py). Outside inputs, and steps before
    the first that measures, are then reused as they were, whatever has changed since; the others are planned as always.
    rehearsal: its store and stand-ins, where one is planned; outside inputs still come from `store`.

    Raises:
        UserError: one line for each thing that is wrong with the pipeline, its parameters or the options.
    """
    declared = pipeline_of(spec, pipeline)
    values = resolve_params(pipeline, declared.params, params)
    seed, device, packages = options.seed, resolve_device(options.device), options.packages
    machine = describe_machine(device)
    sources = Sources(store, past or {})
    wiring = wire(spec, pipeline, values, device=device, outside=sources.kind_of, packages=packages)
    if rehearsal is not None:
        store, stand_ins = rehearsal
        wiring = rehearsed(wiring, packages, stand_ins)
    forced = _with_followers(wiring, _select(wiring, options.force, "--force"))
    selected, left_out = _select_range(wiring, options.from_step, options.to_step)
    parts_of = functools.partial(fingerprint.parts_of, seed=seed, device=device, machine=machine, packages=packages)
    past_parts = _past_parts(wiring, store, past or {})
    parts = _parts_of_all(wiring, sources.artifacts, spec.name, parts_of, past_parts)
    history = StepHistory(store.home, pipeline)
    planned = {
        step.name: _plan_step(step, parts[step.name], store, history, forced, seed=seed, device=device)
        for step in wiring.steps
    }
    _leave_collected(wiring, planned, selected, store)
    _require_present(wiring, planned, selected, options.from_step)
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
        declared=declared,
        remote_code=(*declared.trust_remote_code, *_models_with_code(wiring)),
        trial=options.trial,
        retention=spec.retention if spec.retention is not None and pipeline in spec.retention.after else None,
        remarks=tuple(dict.fromkeys(sources.remarks)),
        rehearsed=rehearsal is not None,
    )


def _models_with_code(wiring: Wiring) -> list[str]:
    """The models that the pipeline loads with their own code."""
    loads = (step.settings for step in wiring.steps if step.function.address == "targets.load_target")
    return sorted({str(settings["model"]) for settings in loads if settings["trust_remote_code"]})


def _past_parts(wiring: Wiring, store: Store, past: Mapping[str, str]) -> PartsByStep:
    """Key parts of the steps reused from a past run, as far as the store still has them."""
    measured = _with_followers(wiring, {step.name for step in wiring.steps if step.function.measures})
    past_parts: PartsByStep = {}
    for step in wiring.steps:
        if step.name not in past or step.name in measured:
            continue
        if store.is_collected(past[step.name]) or store.probe(past[step.name]).artifact is not None:
            past_parts[step.name] = store.record_of(past[step.name])["record"]["parts"]
    return past_parts


def _parts_of_all(
    wiring: Wiring,
    sources: Mapping[str, Artifact],
    file: str,
    parts_of: Callable[[WiredStep, Mapping[str, str], frozenset[str]], fingerprint.KeyParts],
    past_parts: PartsByStep,
) -> PartsByStep:
    """Key parts of every step, inputs before the steps that use them."""
    problems = Problems(file)
    parts: PartsByStep = {}
    keys = {name: artifact.key for name, artifact in sources.items()}
    words = {name: registry_names(artifact) for name, artifact in sources.items()}
    for step in wiring.steps:
        words[step.name] = step.registry_names().union(*(words.get(name, frozenset()) for name in step.input_names()))
        try:
            parts[step.name] = past_parts.get(step.name) or parts_of(step, keys, words[step.name])
            keys[step.name] = fingerprint.key_of(parts[step.name])
        except UserError as error:
            page = page_of_step(step.function.address)
            problems.add(step.line, f"step '{step.name}': {shorten(error)}", page=page)
            keys[step.name] = ""
    problems.stop()
    return parts


def _plan_step(
    step: WiredStep,
    parts: fingerprint.KeyParts,
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


def _leave_collected(wiring: Wiring, planned: dict[str, PlannedStep], selected: set[str], store: Store) -> None:
    """Reuse the bare record of an artifact that was collected, or deleted, where all that take it are reused."""
    for name in (step.name for step in reversed(wiring.steps) if step.name in selected):
        step = planned[name]
        users = [user for user in planned.values() if user.name in selected and name in user.input_names()]
        is_needed = step.forced or not users or not all(user.reused for user in users)
        if not step.reused and not is_needed and store.is_collected(step.key):
            reason = "reused: only its record is left, and nothing that runs needs more"
            planned[name] = replace(step, reason=reason, reused=True, collected=True)


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


def _reason(name: str, parts: fingerprint.KeyParts, why_not: str, history: StepHistory, forced: set[str]) -> str:
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
    """The key parts of each step of a pipeline when it was last made, in `home/steps/PIPELINE/STEP.json`.

    They only explain: keys and artifacts do not depend on them. A file that is lost or broken reads as "never run".
    """

    def __init__(self, home: Path, pipeline: str) -> None:
        self.folder = home / "steps" / pipeline

    def last(self, step: str) -> fingerprint.KeyParts | None:
        """The parts of the key of the last artifact made or reused under this name."""
        try:
            content = json.loads((self.folder / f"{step}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return cast("fingerprint.KeyParts", content) if isinstance(content, dict) else None

    def remember(self, step: str, parts: fingerprint.KeyParts) -> None:
        """Note what went into the key of an artifact that is now in the store."""
        if self.last(step) == parts:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / f"{step}.json", json.dumps(parts))
