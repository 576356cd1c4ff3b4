"""Commands that make things: check what pipelines.yaml says, plan what would run, run it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from flows.spec.params import parse_params
from storage.artifacts.store import Store, default_home, require_writable

if TYPE_CHECKING:
    from flows.execution.local_run import RunOptions


def check(file: File = DEFAULT_FILE) -> None:
    """Is pipelines.yaml right? Every fault in one line, with its line number."""
    from flows.planning.external_inputs import kind_of_source
    from flows.planning.wiring import check_spec
    from flows.spec.schema import load_spec

    store = Store()
    wired = check_spec(load_spec(file), outside=lambda name: kind_of_source(name, store), packages=Invocation.packages)
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
    from flows.execution.local_run import plan_run

    options = _run_options(file, device, seed, from_step, to_step, force)
    planned, _ = plan_run(pipeline, _typed_params(file, pipeline, param), options)
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
    from flows.execution.local_run import plan_run, run_direct

    if online:
        os.environ["HF_HUB_OFFLINE"] = "0"
    options = _run_options(file, device, seed, from_step, to_step, force)
    params = _typed_params(file, pipeline, param)
    first_plan, _ = plan_run(pipeline, params, options)  # wrong input ends here, before anything is started
    width = max(len(step.name) for step in first_plan.steps)
    require_writable(options.home or default_home())
    num_to_run = len(first_plan.steps) - first_plan.num_reused
    echo(f"{pipeline}: {len(first_plan.steps)} steps, {first_plan.num_reused} reused, {num_to_run} to run")
    with Display(out, width) as display:
        options = replace(options, on_event=display.on_event)
        if direct:
            outcome = run_direct(pipeline, params, options)
        else:
            from flows.orchestration.flow import run_with_prefect

            outcome = run_with_prefect(pipeline, params, options=options)
    print_run_summary(outcome, out)


def _typed_params(file: Path, pipeline: str, texts: Sequence[str]) -> dict[str, Any]:
    from flows.spec.schema import load_spec, pipeline_of

    return parse_params(pipeline, pipeline_of(load_spec(file), pipeline).params, texts) if texts else {}


def _run_options(
    file: Path, device: str, seed: int, from_step: str | None, to_step: str | None, force: Sequence[str]
) -> RunOptions:
    from flows.execution.local_run import RunOptions

    return RunOptions(
        file=file,
        device=device,
        seed=seed,
        from_step=from_step,
        to_step=to_step,
        force=tuple(force),
        packages=Invocation.packages,
    )
