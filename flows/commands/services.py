"""Commands that run the servers: one command brings all of them up, one ends them, two tell how they are."""

from __future__ import annotations

from typing import Annotated

import typer

from components.contract import UserError
from flows.commands.terminal import DEFAULT_FILE, File, Invocation, echo
from storage.artifacts.store import Store, default_home

PrefectPort = Annotated[int, typer.Option(min=1, max=65535, help="Where Prefect's server and pages answer.")]
MlflowPort = Annotated[int, typer.Option(min=1, max=65535, help="Where MLflow's server and pages answer.")]


def up(
    file: File = DEFAULT_FILE,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once all is healthy.")] = False,
    prefect_port: PrefectPort = 4200,
    mlflow_port: MlflowPort = 5000,
) -> None:
    """Start Prefect, MLflow and a worker, deploy every pipeline, and keep them running (until Ctrl-C, or `down`)."""
    from flows.console.services_output import bring_all_up
    from flows.services.doctor import check_versions

    bring_all_up(file, detach, prefect_port, mlflow_port, check_versions)


def down() -> None:
    """Stop everything that `up` has started; runs that were going on say Crashed and go on when they are retried."""
    from flows.services.control import stop

    echo("stopped" if stop(default_home()) else "nothing was running")


def status() -> None:
    """What runs, how it is, how much memory it takes, where its pages are. Exit code 1 when something is not well."""
    from flows.console.services_output import print_status

    print_status()


def doctor(
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside what is damaged, and make the history anew from what is whole.")
    ] = False,
) -> None:
    """Look for what breaks runs and servers: versions, ports, disk, damaged files and databases. Exit code 1 if so."""
    from flows.services.doctor import examine

    if repair:
        from storage.repair import repair as mend

        for line in mend(default_home(), Store()) or ["nothing to repair"]:
            echo(f"  {line}")

    worst = 0
    for finding in examine(default_home()):
        mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[finding.verdict]
        echo(f"  {mark} {finding.what}")
        if finding.remedy:
            echo(f"         {finding.remedy}")
        worst = max(worst, finding.verdict == "bad")
    raise typer.Exit(worst)


def deploy(
    file: File = DEFAULT_FILE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change, change nothing.")] = False,
) -> None:
    """Tell the server of every pipeline, schedule and trigger: create, update, prune; what is paused stays paused."""
    from flows.orchestration.environment import prepare
    from flows.planning.plan import check_file

    store = Store()
    check_file(file, store, Invocation.packages)
    if not prepare(store.home):
        raise UserError(
            "deploy: no Prefect server runs; start one with `draftsmith up`, or name one in $PREFECT_API_URL"
        )
    from flows.orchestration.deployments import apply_changes, plan_changes

    changes = plan_changes(file, store.home, Invocation.packages)
    for change in changes:
        echo(f"  {change}")
    to_do = sum(change.apply is not None for change in changes)
    if dry_run or not to_do:
        echo(f"{to_do} changes to make; nothing was changed" if to_do else "the server is as the file says")
        return
    echo(f"{apply_changes(changes)} changes made")
