"""`draftsmith run`: a pipeline, by Prefect or by the engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.commands.run_output import Display, print_run_summary
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
from flows.execution.local_run import execute, plan_to_run
from flows.orchestration.prefect_server import prefect_server
from flows.planning.plan import RunOptions
from flows.spec.schema import SHIPPED, load_spec, pipeline_of
from storage.artifacts.store import Store, require_writable


def demo(
    param: Params = [],  # noqa: B006
    direct: Annotated[bool, typer.Option("--direct", help="The engine alone, without Prefect.")] = False,
) -> None:
    """Run `quickstart` of the pipelines that come with Draftsmith; a model and all else it needs come too."""
    echo(f"its steps stand in {SHIPPED}; a file for your own model is written by: draftsmith init DIR")
    run("quickstart", param, direct, file=SHIPPED)


def run(
    pipeline: Pipeline,
    param: Params = [],  # noqa: B006
    direct: Annotated[bool, typer.Option("--direct", help="The engine alone, without Prefect.")] = False,
    *,
    from_step: From = None,
    to_step: To = None,
    force: Force = [],  # noqa: B006
    trial: Annotated[bool, typer.Option("--trial", help="Keep the release of this run out of the registry.")] = False,
    online: Annotated[bool, typer.Option("--online", help="Steps may read from and upload to hubs.")] = False,
    device: Device = "auto",
    seed: Seed = 0,
    file: File = DEFAULT_FILE,
) -> None:
    """Run a pipeline; finished steps are reused. Killed, the same command goes on where it was."""
    options = RunOptions(file, None, device, seed, from_step, to_step, tuple(force), Invocation.packages, trial, online)
    how = "direct" if direct else "prefect"
    # wrong input ends here, before anything is started
    planned, store = plan_to_run(
        pipeline, param, options, how=how, on_refusal=lambda reason: _tell_refusal(pipeline, file, reason, direct)
    )
    require_writable(store.home)
    num_to_run = len(planned.steps) - planned.num_reused
    echo(f"{pipeline}: {len(planned.steps)} steps, {planned.num_reused} reused, {num_to_run} to run")
    if planned.cost:
        echo(planned.cost)
    with Display(out, width=max(len(step.name) for step in planned.steps)) as display:
        if direct:
            outcome = execute(planned, store, display.on_event, how=how)
        else:
            with prefect_server(store.home) as server:
                from flows.orchestration.flow import run_with_prefect

                outcome = run_with_prefect(planned, store, options, display.on_event, server)
    print_run_summary(outcome, out)


def _tell_refusal(pipeline: str, file: Path, reason: str, direct: bool) -> None:
    """Tell whom `notify:` names of a run that could not be planned; one without Prefect (direct) tells nothing ever."""
    notify = pipeline_of(load_spec(file), pipeline).notify
    if direct or notify is None or "failed" not in notify.on:
        return
    with prefect_server(Store().home) as server:
        from flows.orchestration.notifications import tell

        if server is not None:
            server.wait()
        for line in tell(pipeline, [("failed", reason)], notify, watched=False):
            echo(line)
