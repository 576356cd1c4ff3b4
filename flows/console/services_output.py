"""What `draftsmith up` and `status` do and print: all servers up, the pipelines deployed, how each part is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import typer

from components.contract import UserError
from flows.commands.terminal import echo, echo_error
from flows.services.client import ApiError, PrefectApi, auth_file, is_held, pid_file, running, worker_is_online
from flows.services.control import (
    StartFailed,
    attached,
    links,
    memory_mib,
    require_file,
    start,
    states,
    wait_until_healthy,
)
from flows.services.control import deploy as deploy_pipelines
from flows.services.processes import Settings, check_ports
from flows.services.supervisor import kill_leftovers
from storage.artifacts.store import default_home, require_writable


def bring_all_up(
    file: Path, detach: bool, prefect_port: int, mlflow_port: int, check_versions: Callable[[], object]
) -> None:
    """Start every part and deploy the pipelines. Ends with typer.Exit, whose code says how it went.

    check_versions: raises UserError where what is installed cannot serve.
    """
    home = default_home()
    require_file(file)
    require_writable(home)
    if (services := running(home)) is not None:
        echo(f"already up, as process {services.pid}; draftsmith deploy tells it of changes, draftsmith down ends it")
        _show_links()
        return
    if is_held(pid_file(home)):
        raise UserError(f"another draftsmith up is just starting on {home}, or stopping: look again in a moment")
    settings = Settings(home, file, prefect_port, mlflow_port)
    check_versions()
    kill_leftovers(home)  # of a supervisor that was killed: they would hold the ports
    check_ports(settings)
    supervisor = start(settings, detach=detach)
    try:
        with attached(supervisor, keep=detach):
            deployed = _bring_up(settings, supervisor)
            if not detach:
                echo("Ctrl-C stops everything")
                echo_error(f"the supervisor ended with {supervisor.wait()}, see {settings.logs}/supervisor.log")
                raise typer.Exit(1)
    except KeyboardInterrupt:
        echo("stopped")
        raise typer.Exit(130 if detach else 0) from None
    raise typer.Exit(0 if deployed else 1)


def _bring_up(settings: Settings, supervisor: subprocess.Popen[bytes]) -> bool:
    """Wait for every part, deploy, tell where everything is; whether the pipelines were deployed."""
    began = time.monotonic()
    try:
        wait_until_healthy(settings, supervisor, lambda part: echo(f"  {part} is healthy"))
        services = running(settings.home)
        if services is None:
            raise StartFailed(f"the supervisor ended, see {settings.logs}/supervisor.log")
    except StartFailed as error:
        echo_error(f"draftsmith up: {error}")
        raise typer.Exit(1) from None
    echo(f"up after {time.monotonic() - began:.0f} s")
    deployed = deploy_pipelines(settings, services) == 0
    if not deployed:
        echo_error(f"the servers run, but {settings.file} was not deployed; mend it, then: draftsmith deploy")
    _show_links()
    return deployed


def print_status() -> None:
    """A line for each part. Ends with typer.Exit: 1 when something is not well."""
    home = default_home()
    services = running(home)
    if services is None:
        echo(f"not running on {home}; start with: draftsmith up")
        raise typer.Exit(1)
    well = True
    api = PrefectApi(services.prefect_api_url, services.auth_string)
    for part in states(home):
        how = "healthy" if part.healthy else "starting" if part.pid else "waiting to start again"
        again = f", restarted {part.restarts} times, last: {part.last_end}" if part.restarts else ""
        echo(f"  {part.name:<10} {how} (process {part.pid or '-'}){again}")
        well &= part.healthy
    try:
        online = well and worker_is_online(api, services.work_pool)
    except ApiError as error:
        raise UserError(f"{error}; look again in a minute, or run: draftsmith doctor") from None
    echo(f"  {'worker':<10} {'takes runs from pool ' + services.work_pool if online else 'does not take runs yet'}")
    echo(f"  {'memory':<10} {memory_mib(home):.0f} MiB in all")
    _show_links()
    raise typer.Exit(0 if well and online else 1)


def _show_links() -> None:
    home = default_home()
    services = running(home)
    if services is None:
        return
    for what, address in links(services, home):
        echo(f"  {what:<16} {address}")
    if services.auth_string:
        echo(f"  {'password':<16} both pages ask for it once: cat {auth_file(home)}")
