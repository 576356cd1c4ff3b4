"""A plan as people read it: a table with the reason for every step, a drawing in Mermaid; and as JSON."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.text import in_mermaid
from flows.planning.plan import Plan


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


def as_mermaid(plan: Plan) -> str:
    """The plan as a Mermaid flowchart; what would run is drawn with a thick border."""
    ids = {name: f"n{number}" for number, name in enumerate([*plan.sources, *(step.name for step in plan.steps)])}
    lines = ["flowchart LR"]
    lines += [f'  {ids[name]}[("{in_mermaid(name)}")]' for name in plan.sources]
    for step in plan.steps:
        label = "reused" if step.reused else in_mermaid(step.reason)
        lines.append(f'  {ids[step.name]}["{in_mermaid(step.name)}<br/><small>{step.kind}: {label}</small>"]')
        if not step.reused:
            lines.append(f"  style {ids[step.name]} stroke-width:3px")
    for step in plan.steps:
        lines += [f"  {ids[name]} --> {ids[step.name]}" for name in step.input_names() if name in ids]
    return "\n".join(lines)


def plan_as_json(plan: Plan) -> str:
    """Every step of the plan with its settings, inputs, key and reason, as one JSON list."""
    return json.dumps([dataclasses.asdict(step) for step in plan.steps], indent=1, default=str)
