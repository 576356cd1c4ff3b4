"""Commands on what was measured: measure it again, hold two ways to serve against each other, a number over time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from components.promotion import MAX_ACCEPTANCE_LOSS, MAX_SLOWDOWN, Margins
from flows.commands.inspect import named_values
from flows.commands.terminal import DEFAULT_FILE, File, Invocation, echo, echo_error, out
from flows.console.query_output import Format, print_in
from storage.artifacts.store import Store, default_home, require_writable


class Over(StrEnum):
    """What a trend runs over."""

    runs = "runs"
    machines = "machines"
    versions = "versions"


def remeasure(
    release: Annotated[str, typer.Argument(help="NAME, NAME@ALIAS, NAME@VERSION or the start of a Release's key.")],
    file: File = DEFAULT_FILE,
) -> None:
    """Measure a finished release again. Nothing is trained; its evidence is added to, and the gate decides anew."""
    from flows.analysis.remeasure import plan_remeasurement, run_remeasurement
    from flows.console.progress import Display
    from flows.console.run_summary import print_remeasurement, print_run_summary
    from flows.planning.plan import RunOptions

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


def compare(
    a: Annotated[str, typer.Argument(help="A run, a key (Draft, DepthPolicy, Release) or NAME@ALIAS.")],
    b: Annotated[
        str, typer.Argument(help="Likewise; `champion`: the registered champion for A's target.")
    ] = "champion",
    *,
    depth_a: Annotated[int | None, typer.Option("--depth-a", min=0, help="A's depth, if not the chosen one.")] = None,
    depth_b: Annotated[int | None, typer.Option("--depth-b", min=0, help="B's depth, if not the chosen one.")] = None,
    tree_a: Annotated[int | None, typer.Option("--tree-a", min=1, help="A with a tree of this budget.")] = None,
    tree_b: Annotated[int | None, typer.Option("--tree-b", min=1, help="B with a tree of this budget.")] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of B's speed by which A may lie below.")
    ] = MAX_SLOWDOWN,
    acceptance_margin: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="The same of acceptance length; of one workload twice that.")
    ] = MAX_ACCEPTANCE_LOSS,
    format_: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
) -> None:
    """A against B on the same prompts. Exit code 0: A is not worse; 1: it is; 3: undecided or not comparable."""
    from flows.analysis import compare as comparison

    store = Store()
    side_a = comparison.find_side(store, a, depth_a, tree_a)
    side_b = (
        comparison.find_champion(store, side_a) if b == "champion" else comparison.find_side(store, b, depth_b, tree_b)
    )
    outcome = comparison.compare(store.home, side_a, side_b, Margins(margin, acceptance_margin))
    if format_ is Format.table:
        echo(f"A: {side_a.name()}\nB: {side_b.name()}")
    columns, rows = outcome.rows()
    if rows or format_ is not Format.table:
        print_in(format_, out, columns, rows)
    report = echo if format_ is Format.table else echo_error
    for note in outcome.notes:
        report(note)
    report(f"verdict: A is {outcome.verdict().replace('_', ' ')}" if rows else "verdict: not comparable")
    if outcome.exit_code():
        raise typer.Exit(outcome.exit_code())


def trend(
    metric: Annotated[
        str, typer.Argument(help="A number of any view (speedup_meas, v_speed.tokens_per_s), or info.NAME.")
    ],
    over: Annotated[Over, typer.Option(help="What the values are told apart by.")] = Over.runs,
    filters: Annotated[
        list[str], typer.Option("--where", "-w", help="COLUMN=VALUE that rows must have; may be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    limit: Annotated[int, typer.Option(min=1, help="The last values of each series.")] = 50,
    picture: Annotated[Path | None, typer.Option(help="Write a page with a chart here (HTML).")] = None,
    format_: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
) -> None:
    """One number over runs, machines or versions: a table, a line of bars, a picture."""
    from flows.analysis.trend import draw, find_trend, spark_lines, table

    result = find_trend(default_home(), metric, named_values(filters), limit)
    print_in(format_, out, *table(result, over.value))
    if format_ is Format.table:
        for line in spark_lines(result) if over is Over.runs else []:
            echo(line)
        echo(f"{result.metric}: {len(result.dots)} values")
    if picture is not None:
        draw(result, over.value, picture)
        if format_ is Format.table:
            echo(f"drawn: {picture}")
