"""Commands that run the servers: one command brings all of them up, one ends them, two tell how they are."""

from __future__ import annotations

import subprocess
import time
from typing import Annotated

import typer

from components.contract import UserError
from flows.commands.terminal import DEFAULT_FILE, File, Invocation, echo, echo_error
from flows.orchestration.prefect_server import prepare
from flows.planning.plan import check_file
from flows.services import control
from flows.services.client import ApiError, PrefectApi, auth_file, is_held, pid_file, running, worker_is_online
from flows.services.processes import Settings, check_ports, public_address
from flows.services.supervisor import kill_leftovers
from storage.artifacts.store import Store, default_home, require_writable

PrefectPort = Annotated[int, typer.Option(min=1, max=65535, help="Where Prefect's server and pages answer.")]
MlflowPort = Annotated[int, typer.Option(min=1, max=65535, help="Where MLflow's server and pages answer.")]
PublicUrl = Annotated[
    str,
    typer.Option(
        envvar="DRAFTSMITH_PUBLIC_URL",
        help="Where a proxy shows the pages to others, https://HOST: links say this instead of 127.0.0.1.",
    ),
]


def up(
    file: File = DEFAULT_FILE,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once all is healthy.")] = False,
    prefect_port: PrefectPort = 4200,
    mlflow_port: MlflowPort = 5000,
    public_url: PublicUrl = "",
) -> None:
    """Start Prefect, MLflow and a worker, deploy every pipeline, and keep them running (until Ctrl-C, or `down`)."""
    from flows.services.doctor import check_versions

    home = default_home()
    if not file.is_file():
        raise UserError(f"{file}: no such pipelines file; name another with --file")
    require_writable(home)
    if (services := running(home)) is not None:
        echo(f"already up, as process {services.pid}; draftsmith deploy tells it of changes, draftsmith down ends it")
        _show_links()
        return
    if is_held(pid_file(home)):
        raise UserError(f"another draftsmith up is just starting on {home}, or stopping: look again in a moment")
    settings = Settings(home, file, prefect_port, mlflow_port, public_address(public_url))
    check_versions()
    kill_leftovers(home)  # of a supervisor that was killed: they would hold the ports
    check_ports(settings)
    supervisor = control.start(settings, detach=detach)
    try:
        with control.attached(supervisor, keep=detach):
            deployed = _bring_up(settings, supervisor)
            if not detach:
                echo("Ctrl-C stops everything")
                echo_error(f"the supervisor ended with {supervisor.wait()}, see {settings.logs}/supervisor.log")
                raise typer.Exit(1)
    except KeyboardInterrupt:
        echo("stopped")
        raise typer.Exit(130 if detach else 0) from None
    raise typer.Exit(0 if deployed else 1)


def down() -> None:
    """Stop everything that `up` has started; runs that were going on say Crashed and go on when they are retried."""
    echo("stopped" if control.stop(default_home()) else "nothing was running")


def status() -> None:
    """What runs, how it is, how much memory it takes, where its pages are. Exit code 1 when something is not well."""
    home = default_home()
    services = running(home)
    if services is None:
        echo(f"not running on {home}; start with: draftsmith up")
        raise typer.Exit(1)
    well = True
    api = PrefectApi(services.prefect_api_url, services.auth_string)
    for part in control.states(home):
        how = "healthy" if part.healthy else "starting" if part.pid else "waiting to start again"
        again = f", restarted {part.restarts} times, last: {part.last_end}" if part.restarts else ""
        echo(f"  {part.name:<10} {how} (process {part.pid or '-'}){again}")
        well &= part.healthy
    try:
        online = well and worker_is_online(api, services.work_pool)
    except ApiError as error:
        raise UserError(f"{error}; look again in a minute, or run: draftsmith doctor") from None
    echo(f"  {'worker':<10} {'takes runs from pool ' + services.work_pool if online else 'does not take runs yet'}")
    echo(f"  {'memory':<10} {control.memory_mib(home):.0f} MiB in all")
    _show_links()
    raise typer.Exit(0 if well and online else 1)


def doctor(
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside what is damaged, and make the history anew from what is whole.")
    ] = False,
) -> None:
    """Look for what breaks runs and servers: versions, ports, disk, damaged files and databases. Exit code 1 if so."""
    from flows.services.doctor import examine, mend

    if repair:
        for line in mend(default_home()):
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


def _bring_up(settings: Settings, supervisor: subprocess.Popen[bytes]) -> bool:
    """Wait for every part, deploy, tell where everything is; whether the pipelines were deployed."""
    began = time.monotonic()
    try:
        control.wait_until_healthy(settings, supervisor, lambda part: echo(f"  {part} is healthy"))
        services = running(settings.home)
        if services is None:
            raise control.StartFailed(f"the supervisor ended, see {settings.logs}/supervisor.log")
    except control.StartFailed as error:
        echo_error(f"draftsmith up: {error}")
        raise typer.Exit(1) from None
    echo(f"up after {time.monotonic() - began:.0f} s")
    deployed = control.deploy(settings, services) == 0
    if not deployed:
        echo_error(f"the servers run, but {settings.file} was not deployed; mend it, then: draftsmith deploy")
    _show_links()
    return deployed


def _show_links() -> None:
    home = default_home()
    services = running(home)
    if services is None:
        return
    for what, address in control.links(services, home):
        echo(f"  {what:<16} {address}")
    if services.auth_string:
        echo(f"  {'password':<16} the pages ask for it once: cat {auth_file(home)}")
