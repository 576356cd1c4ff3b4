"""`draftsmith plan NAME --on MACHINE`: what the real run will take there, worked out from configurations alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from components.tables import duration
from flows.commands.terminal import echo, print_answer
from flows.planning.estimate import NOT_COUNTED, Estimator, RunEstimate, configs_beside
from flows.planning.external_inputs import Sources
from flows.planning.machines import PlannedMachine, find_machine
from flows.planning.wiring import wire
from flows.planning.workload import in_bytes
from flows.spec.params import parse_params, resolve_params
from flows.spec.schema import load_spec, pipeline_of
from storage.artifacts.store import Store

COLUMNS = ("step", "takes", "time by", "memory", "disk", "network")


def estimate_run(
    pipeline: str,
    params: Sequence[str],
    machine: PlannedMachine,
    file: Path,
    store: Store,
    packages: tuple[str, ...],
    *,
    training: bool = True,
) -> RunEstimate:
    """The estimate of a pipeline with these parameters (NAME=VALUE).

    training: False leaves out drafters and what needs them, whose counting takes longer than all else.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    spec = load_spec(file)
    declared = pipeline_of(spec, pipeline).params
    values = resolve_params(pipeline, declared, parse_params(pipeline, declared, params))
    sources = Sources(store)
    device = "cuda" if machine.is_gpu else "cpu"
    wiring = wire(spec, pipeline, values, device=device, outside=sources.kind_of, packages=packages)
    if not training:
        of_drafts = set[str]()
        for step in wiring.steps:
            if step.address == "drafts.train_draft" or of_drafts.intersection(step.input_names()):
                of_drafts.add(step.name)
        wiring = dataclasses.replace(wiring, steps=tuple(one for one in wiring.steps if one.name not in of_drafts))
    return Estimator(machine, store, configs_beside(file)).run(wiring, pipeline, sources.artifacts)


def print_on(
    pipeline: str,
    params: Sequence[str],
    on: str,
    price: float | None,
    file: Path,
    packages: tuple[str, ...],
    console: Console,
    *,
    as_json: bool,
) -> int:
    """Print the estimate; 1 where something does not fit."""
    machine = find_machine(on, file)
    estimate = estimate_run(pipeline, params, machine, file, Store(), packages)
    price = machine.price if price is None else price
    price = None if price is None else price * estimate.machines
    if as_json:
        cost = None if price is None else price * estimate.seconds / 3600
        content = {"machine": machine.name, "machines": estimate.machines, "seconds": estimate.seconds, "cost": cost}
        content |= dataclasses.asdict(estimate)
        echo(json.dumps(content, indent=1))
    else:
        _print(pipeline, machine, estimate, price, console)
    return 1 if estimate.faults else 0


def _print(
    pipeline: str, machine: PlannedMachine, estimate: RunEstimate, price: float | None, console: Console
) -> None:
    device = machine.device
    each = f"{device.memory_gb:,.0f} GB" if machine.is_gpu else f"{device.memory_gb:,.0f} GB of memory"
    several = f"{estimate.machines} machines of " if estimate.machines > 1 else ""
    echo(f"{pipeline} on {machine.name}: {several}{machine.count} x {device.about}, {each}")
    rows = []
    for step in estimate.steps:
        together = f"{step.devices} GPUs" if machine.is_gpu else f"{step.machines} machines"
        shared = f" on {together}" if step.devices > 1 else ""
        cells = [
            in_bytes(step.memory_bytes) + " each" * (step.devices > 1),
            _or_none(step.disk),
            _or_none(step.network),
        ]
        rows.append([step.name, (duration(step.seconds) if step.seconds else "") + shared, step.seconds_by, *cells])
    print_answer(console, COLUMNS, rows)
    for name, why in estimate.skipped:
        echo(f"{name}: left out: {why}")
    cost = "" if price is None else f", {price * estimate.seconds / 3600:,.2f} at {price:g} an hour"
    least = "at least " if any(step.seconds_by == NOT_COUNTED for step in estimate.steps) else ""
    sizes = f"{in_bytes(estimate.disk)} of disk, {in_bytes(estimate.network)} over the network"
    echo(f"all: {least}{duration(estimate.seconds)}{cost}; {sizes}")
    for step in estimate.steps:
        if len(step.memory) > 1:
            parts = ", ".join(f"{name} {in_bytes(part)}" for name, part in step.memory.items() if part)
            echo(f"memory of {step.name}: {parts}")
    for step in estimate.steps:
        if step.linked:
            echo(f"{step.name}: {in_bytes(step.linked)} from each GPU to others")
        if step.across:
            echo(f"{step.name}: {in_bytes(step.across)} from each machine to another")
        for note in step.notes:
            echo(f"{step.name}: {note}")
        if step.kind == "training" and machine.count > (used := step.devices // step.machines):
            most = machine.count - step.at_server
            echo(f"{step.name}: uses {used} of {machine.count} GPUs: set processes: {most}")
    for words in estimate.assumed:
        echo(f"rests on: {words}")
    for source in device.sources:
        echo(f"figures of {machine.name}: {source}")
    for fault in estimate.faults:
        echo(f"does not fit: {fault}")


def _or_none(number: int) -> str:
    return in_bytes(number) if number else ""
