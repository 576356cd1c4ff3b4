"""Commands that make things: check what pipelines.yaml says, plan what would run, run it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

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
from storage.artifacts.store import Store, require_writable


def check(file: File = DEFAULT_FILE) -> None:
    """Is pipelines.yaml right? Every fault in one line, with its line number."""
    from flows.planning.plan import check_file

    wired = check_file(file, Store(), Invocation.packages)
    counts = ", ".join(f"{name} ({len(wiring.steps)} steps)" for name, wiring in wired.items())
    echo(f"{file.name} is right: {counts}")


def plan(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006 (typer copies it)
    *,
    from_step: From = None,
    to_step: To = None,
    force: Force = [],  # noqa: B006
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As a drawing in Mermaid.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> None:
    """What would run, what is reused, and why. Changes nothing."""
    from flows.console.plan_output import as_mermaid, plan_as_json, print_plan
    from flows.planning.plan import RunOptions, plan_run

    options = RunOptions(file, None, device, seed, from_step, to_step, tuple(force), Invocation.packages)
    planned, _ = plan_run(pipeline, param, options)
    if as_json:
        echo(plan_as_json(planned))
    elif mermaid:
        echo(as_mermaid(planned))
    else:
        print_plan(planned, out)


def run(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006
    direct: Annotated[bool, typer.Option("--direct", help="The engine alone, without Prefect.")] = False,
    *,
    from_step: From = None,
    to_step: To = None,
    force: Force = [],  # noqa: B006
    online: Annotated[bool, typer.Option("--online", help="Steps may read from and upload to hubs.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> None:
    """Run a pipeline; finished steps are reused. Killed, the same command goes on where it was."""
    from flows.console.progress import Display
    from flows.console.run_summary import print_run_summary
    from flows.planning.plan import RunOptions, plan_run

    if online:
        os.environ["HF_HUB_OFFLINE"] = "0"
    options = RunOptions(file, None, device, seed, from_step, to_step, tuple(force), Invocation.packages)
    planned, store = plan_run(pipeline, param, options)  # wrong input ends here, before anything is started
    require_writable(store.home)
    num_to_run = len(planned.steps) - planned.num_reused
    echo(f"{pipeline}: {len(planned.steps)} steps, {planned.num_reused} reused, {num_to_run} to run")
    with Display(out, width=max(len(step.name) for step in planned.steps)) as display:
        if direct:
            from flows.execution.local_run import execute

            outcome = execute(planned, store, display.on_event, how="direct")
        else:
            from flows.orchestration.environment import prefect_server

            with prefect_server(store.home) as server:
                from flows.orchestration.flow import run_with_prefect

                outcome = run_with_prefect(planned, store, options, display.on_event, server)
    print_run_summary(outcome, out)
