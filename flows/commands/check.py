"""`draftsmith check` and `plan`: is pipelines.yaml right, and what would run, and why. Neither changes anything."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.contract import UserError
from components.pipeline_checks.files_there import files_not_there
from components.pipeline_checks.verdict_prompts import SeenStep, few_prompts
from flows.commands.terminal import (
    DEFAULT_FILE,
    Device,
    File,
    Force,
    From,
    Invocation,
    Params,
    Pipeline,
    Seed,
    To,
    echo,
    out,
)
from flows.planning.plan import Plan, RunOptions, check_file, plan_run
from storage.artifacts.store import Store


def check(file: File = DEFAULT_FILE) -> None:
    """Is pipelines.yaml right? Every fault in one line, with its line number; and which files are not there yet."""
    wired = check_file(file, Store(), Invocation.packages)
    counts = ", ".join(f"{name} ({len(wiring.steps)} steps)" for name, wiring in wired.items())
    echo(f"{file.name} is right: {counts}")
    for line in dict.fromkeys(line for wiring in wired.values() for line in files_not_there(wiring.steps)):
        echo(f"not there yet: {file.name}:{line}")
    steps = [[SeenStep(s.name, s.line, s.address, s.settings, s.inputs) for s in each.steps] for each in wired.values()]
    for line in dict.fromkeys(line for of_one in steps for line in few_prompts(of_one)):
        echo(f"too few prompts: {file.name}:{line}")


def plan(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006 (typer copies it)
    *,
    from_step: From = None,
    to_step: To = None,
    force: Force = [],  # noqa: B006
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a drawing in Mermaid.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    on: Annotated[
        str, typer.Option("--on", help="What the run would take on such a machine: h100x8, here, ... (machines.yaml).")
    ] = "",
    price: Annotated[
        float | None, typer.Option(min=0, help="With --on: of an hour of the whole machine; the cost is told.")
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> int:
    """What would run, what is reused, and why; with --on, what it would take. Changes nothing."""
    if on or price is not None:
        others = {"--from": from_step, "--to": to_step, "--force": force, "--mermaid": mermaid}
        others |= {"--device": device != "auto", "--price": not on}
        if words := [option for option, value in others.items() if value]:
            raise UserError(f"plan: {words[0]} does not go with --on" if on else "plan: --price goes with --on MACHINE")
        from flows.commands.plan_on import print_on

        return print_on(pipeline, param, on, price, file, Invocation.packages, out, as_json=as_json)
    options = RunOptions(file, None, device, seed, from_step, to_step, tuple(force), Invocation.packages)
    planned, _ = plan_run(pipeline, param, options)
    if as_json:
        echo(json.dumps([dataclasses.asdict(step) for step in planned.steps], indent=1, default=str))
    elif mermaid:
        echo(planned.mermaid())
    else:
        print_plan(planned, out)
        steps = [SeenStep(s.name, s.line, s.uses, s.settings, s.inputs) for s in planned.steps if not s.reused]
        for line in few_prompts(steps):
            echo(f"too few prompts: {file.name}:{line}")
    return 0


def print_plan(plan: Plan, console: Console) -> None:
    """A table of all steps, then how many would run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step", no_wrap=True)
    table.add_column("makes", no_wrap=True)
    table.add_column("key", no_wrap=True)
    table.add_column("why")
    elsewhere = any(step.runs_on.cluster for step in plan.steps)
    if elsewhere:
        table.add_column("runs on", no_wrap=True)
    for step in plan.steps:
        style = "dim" if step.reused else ""
        reason = Text(step.reason, style=style if step.reused else "yellow")
        cells = [Text(cell, style=style) for cell in (step.name, step.kind, step.key[:12])]
        table.add_row(*cells, reason, *[Text(str(step.runs_on), style=style)] * elsewhere)
    for name, why_not in plan.skipped:
        table.add_row(Text(name, style="dim"), "", "", Text(f"left out: {why_not}", style="dim"))
    console.print(table)
    num_to_run = len(plan.steps) - plan.num_reused
    console.print(
        f"{len(plan.steps)} steps: {plan.num_reused} reused, {num_to_run} to run on {plan.device}", markup=False
    )
