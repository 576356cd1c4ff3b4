"""`draftsmith rehearse`: a pipeline whole, within minutes, with small numbers and a stand-in for a large target.

`draftsmith night`: the nightly one, for real or rehearsed.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from components.contract import Artifact, NothingNew, UserError
from components.data.sources.python_stdlib import write_module_chats
from components.engines.stand_in_server import stand_in_server
from components.text import shorten
from flows.commands.run import run
from flows.commands.run_output import Display, duration
from flows.commands.terminal import DEFAULT_FILE, Device, File, Invocation, Params, Pipeline, Seed, echo, out
from flows.execution.engine import Engine
from flows.execution.hubs import reach_hubs
from flows.execution.messages import Event, StepFailed
from flows.planning.machines import HERE, find_machine
from flows.planning.plan import Plan, PlannedStep, RunOptions, plan_rehearsal
from flows.planning.rehearsal import StandIns
from flows.spec.placement import parse_pipeline_placement
from storage.artifacts.store import Store, require_writable


@dataclass
class Rehearsed:
    """How a step went. state: "passed", "failed" or "not reached"; remarks: why, or what the step noted."""

    state: str
    seconds: float
    remarks: list[str]


def rehearse(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006
    *,
    online: Annotated[bool, typer.Option("--online", help="Data on hubs are read from there.")] = False,
    on: Annotated[
        str, typer.Option("--on", help="The machine that the real run has to fit: h100x8, ... (machines.yaml).")
    ] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep what the steps made, to be looked at.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> int:
    """Run a pipeline small, with a random stand-in for its target: faults that would come up after hours come up now.

    Nothing enters the history, the registry or the store.
    """
    reach_hubs(pipeline, declared=False, asked=online)
    options = RunOptions(file, None, device, seed, packages=Invocation.packages)
    home = Store(options.home).home / "rehearsals" / pipeline
    began = time.monotonic()
    shutil.rmtree(home, ignore_errors=True)
    store = Store(home)
    with contextlib.ExitStack() as servers:
        states = home / "states"
        server_of = functools.cache(lambda engine: servers.enter_context(stand_in_server(engine, states)).url)
        chats = None if online else write_module_chats(home / "chats.jsonl")
        configs = None if online else options.file.resolve().parent / "configs"
        planned = plan_rehearsal(pipeline, param, options, store, StandIns(server_of, chats, configs, states))
        require_writable(home)
        on = on or _machine_of_pool(planned, file)
        faults = _misfits(planned, param, on, file)
        echo(f"{pipeline}: a rehearsal of {len(planned.steps)} steps")
        with Display(out, width=max(len(step.name) for step in planned.steps)) as display:
            went = run_all(planned, store, display)
    for step in planned.steps:
        if chats is not None and str(chats) in str(step.settings):
            went[step.name].remarks.append("other rows stand for data that are elsewhere: --online tries their columns")
    _print(planned, went, on, faults)
    failed = sum(one.state == "failed" for one in went.values()) + len(faults)
    if not keep:
        shutil.rmtree(home, ignore_errors=True)
    elif home.is_dir():
        echo(f"what it made: {home}")
    passed = sum(one.state == "passed" for one in went.values())
    fit = f"; the real run does not fit {on}" if faults else ""
    echo(f"{pipeline}: {passed} of {len(went)} steps passed in {duration(time.monotonic() - began)}{fit}")
    return 1 if failed else 0


def night(
    pipeline: Annotated[str, typer.Argument(help="The pipeline that runs every night.")] = "nightly",
    param: Params = [],  # noqa: B006
    *,
    rehearsed: Annotated[
        bool, typer.Option("--rehearse", help="Play it through, small, on the last traffic; nothing is kept.")
    ] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> int | None:
    """Run the nightly pipeline now, as `draftsmith run nightly` does.

    With --rehearse its steps run small, with the champion and on the traffic that is there, read or not: what would
    fail at two at night fails now. Nothing is promoted, registered or marked as read.
    """
    if rehearsed:
        return rehearse(pipeline, param, device=device, seed=seed, file=file)
    run(pipeline, param, device=device, seed=seed, file=file)
    return None


def _machine_of_pool(plan: Plan, file: Path) -> str:
    """The machine by whose name the pipeline's work pool goes, with as many GPUs as it asks for; "" where none does."""
    runs_on = parse_pipeline_placement(plan.declared.runs_on if plan.declared is not None else None)
    for name in (f"{runs_on.pool}x{runs_on.gpus}", str(runs_on.pool)):
        with contextlib.suppress(UserError):
            return find_machine(name, file).name
    return ""


def _misfits(plan: Plan, params: Params, on: str, file: Path) -> tuple[str, ...]:
    """What of the real run does not fit the machine that it is meant for, a line each; said before anything runs.

    Where none is named it may be meant for another than this one: what does not fit here, up to training, is said in a
    line and is no fault.
    """
    from flows.commands.plan_on import estimate_run

    machine = find_machine(on or HERE, file)
    try:
        faults = estimate_run(plan.pipeline, params, machine, file, Store(), plan.packages, training=bool(on)).faults
    except UserError as error:
        faults = tuple(str(error).splitlines())
    if not on:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        if faults:
            echo(f"the real run does not fit this machine: {faults[0]}{more}; --on MACHINE holds it against another")
        return ()
    for fault in faults:
        echo(f"does not fit {on}: {fault}")
    return faults


def run_all(plan: Plan, store: Store, display: Display) -> dict[str, Rehearsed]:
    """Run every step that can be reached, also past failures, so that one rehearsal finds all faults."""
    went: dict[str, Rehearsed] = {}
    notes: dict[str, list[str]] = {}

    def on_event(step: PlannedStep, event: Event) -> None:
        if event["event"] != "note":  # what steps say of their numbers is not true of the real run
            display.on_event(step, event)
        elif step.uses in ("targets.make_stand_in", "publish.reopen_release"):
            notes.setdefault(step.name, []).append(str(event["message"]))

    engine = Engine(store, plan, on_event)
    artifacts: dict[str, Artifact] = dict(plan.sources)
    for step in plan.steps:
        went[step.name] = _run_one(engine, step, artifacts, went)
        went[step.name].remarks += notes.get(step.name, [])
    return went


def _run_one(
    engine: Engine, step: PlannedStep, artifacts: dict[str, Artifact], went: Mapping[str, Rehearsed]
) -> Rehearsed:
    lost = next((name for name in step.input_names() if name in went and went[name].state != "passed"), None)
    if lost is not None:
        return Rehearsed("not reached", 0.0, [f"it needs '{lost}'"])
    began = time.monotonic()
    try:
        artifacts[step.name] = engine.run_step(step, artifacts)
    except (UserError, StepFailed, NothingNew) as error:
        return Rehearsed("failed", time.monotonic() - began, str(error).splitlines())
    return Rehearsed("passed", time.monotonic() - began, [])


def _print(plan: Plan, went: Mapping[str, Rehearsed], on: str, faults: Sequence[str]) -> None:
    """A line for each step: how it went, its seconds, and why it failed or what is not tried; no line is cut.

    faults: of the real run on the machine `on`, a line each.
    """
    rows = [
        (name, one.state, f"{one.seconds:.1f} s", "; ".join(map(shorten, one.remarks))) for name, one in went.items()
    ]
    rows += [(name, "left out", "", why) for name, why in plan.skipped]
    rows += [(on, "failed", "", f"does not fit: {fault}") for fault in faults]
    width = max(len(name) for name, *_ in rows)
    for name, state, seconds, why in rows:
        style = {"passed": "", "failed": "red"}.get(state, "dim")
        out.print(Text(f"{name:<{width}}  {state:<11}  {seconds:>7}  {why}".rstrip(), style=style), soft_wrap=True)
