"""Starts, watches and stops the supervisor of a home, for `up`, `down` and `status`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flows.services.child import bound
from flows.services.child import stop as stop_child
from flows.services.client import (
    ApiError,
    Services,
    client_environment,
    fetch,
    is_held,
    mlflow_headers,
    pid_file,
    report_address,
    running,
)
from flows.services.processes import Settings
from flows.services.supervisor import kill_leftovers, open_log, processes_of_home, state_file

HEALTHY_WITHIN_S = 300.0  # 20-50 s as a rule; a first start on a busy machine also migrates two databases
STOPS_WITHIN_S = 60.0


@dataclass(frozen=True)
class PartState:
    """A part as the supervisor last saw it."""

    name: str
    pid: int | None
    healthy: bool
    restarts: int
    last_end: str


class StartFailed(Exception):
    """The parts did not become healthy; the message names the one and its log."""


def start(settings: Settings, *, detach: bool) -> subprocess.Popen[bytes]:
    """Start the supervisor; attached, it ends with this process, however that ends."""
    command = [sys.executable, "-m", "flows.services.supervisor", str(settings.home), str(settings.file.absolute())]
    command += [str(settings.prefect_port), str(settings.mlflow_port), settings.public_url]
    if not detach:
        command = bound(command)
    state_file(settings.home).unlink(missing_ok=True)
    with open_log(settings.logs / "supervisor.log") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def wait_until_healthy(
    settings: Settings, supervisor: subprocess.Popen[bytes], on_healthy: Callable[[str], None]
) -> None:
    """Return when every part is healthy. on_healthy: called with the name of each part once it is.

    Raises:
        StartFailed: a part keeps dying, or the time is over.
    """
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    reported: set[str] = set()
    while True:
        parts = states(settings.home)
        for part in parts:
            if part.healthy and part.name not in reported:
                reported.add(part.name)
                on_healthy(part.name)
        if parts and all(part.healthy for part in parts):
            return
        broken = next((part for part in parts if part.restarts >= 3), None)
        if supervisor.poll() is not None:
            raise StartFailed(f"the supervisor ended with {supervisor.returncode}, see {settings.logs}/supervisor.log")
        if broken is not None:
            raise StartFailed(f"{broken.name} keeps dying ({broken.last_end}), see {settings.logs / broken.name}.log")
        if time.monotonic() > deadline:
            late = ", ".join(part.name for part in parts if not part.healthy) or "nothing"
            raise StartFailed(f"after {HEALTHY_WITHIN_S:.0f} s still not healthy: {late}; logs are in {settings.logs}")
        time.sleep(0.2)


def states(home: Path) -> list[PartState]:
    """The state of every part of a running supervisor; [] when none runs."""
    if not is_held(pid_file(home)):
        return []
    try:
        content: dict[str, Any] = json.loads(state_file(home).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    fields = ("pid", "healthy", "restarts", "last_end")
    return [PartState(name, **{field: facts[field] for field in fields}) for name, facts in content.items()]


def stop(home: Path) -> bool:
    """Stop the supervisor of a home and all below it; False when there was nothing to stop.

    Raises:
        RuntimeError: it did not stop in time, not even when it was killed.
    """
    file = pid_file(home)
    if not is_held(file):
        return bool(kill_leftovers(home))  # of a supervisor that was killed
    while not (text := file.read_text(encoding="utf-8").strip()):  # the supervisor is just starting, or just ending
        if not is_held(file):
            return True
        time.sleep(0.05)
    pid = int(text)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if not _is_released(file, STOPS_WITHIN_S):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        kill_leftovers(home)
        if not _is_released(file, 5.0):
            raise RuntimeError(f"process {pid} holds {file} and does not end")
    return True


def _is_released(lock: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while is_held(lock):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def deploy(settings: Settings, services: Services) -> int:
    """`draftsmith deploy` in a process of its own, whose Prefect client is gone again after it; its exit code."""
    environment = os.environ | client_environment(services) | {"DRAFTSMITH_HOME": str(settings.home)}
    command = [sys.executable, "-m", "flows.cli", "deploy", "--file", str(settings.file)]
    return subprocess.run(command, env=environment, check=False).returncode


def links(services: Services, home: Path) -> list[tuple[str, str]]:
    """(label, URL) of the pages that people want."""
    pages = [
        ("dashboard", f"{services.pages}/dashboard/"),
        ("pipelines, runs", f"{services.prefect_pages}/deployments"),
        ("models, numbers", f"{services.mlflow_pages}/#/experiments/{_latest_experiment(services)}/runs"),
    ]
    return [*pages, ("newest report", newest_report(home))]


def newest_report(home: Path) -> str:
    """The address of the newest report page, its file where no server of ours shows it; before the first, how to make
    it."""
    pages = sorted((home / "store").glob("*/index.html"), key=lambda page: page.stat().st_mtime)
    if not pages:
        return "none yet: draftsmith run quickstart"
    return report_address(home, pages[-1].parent.name) or pages[-1].as_uri()


def _latest_experiment(services: Services) -> str:
    """The experiment of the newest run; MLflow's own first one while there is no run."""
    address, headers = f"{services.mlflow_url}/api/2.0/mlflow", mlflow_headers(services)
    newest = {"max_results": 1, "order_by": ["attributes.start_time DESC"]}
    try:
        found = fetch(f"{address}/experiments/search?max_results=1000", headers=headers) or {}
        experiments = [experiment["experiment_id"] for experiment in found.get("experiments", [])]
        body = {"experiment_ids": experiments, **newest}
        answer = fetch(f"{address}/runs/search", body=body, headers=headers | {"Content-Type": "application/json"})
    except ApiError:
        return "0"
    runs = (answer or {}).get("runs") or [{"info": {"experiment_id": "0"}}]
    return str(runs[0]["info"]["experiment_id"])


def memory_mib(home: Path) -> float:
    """Memory in MiB of the supervisor and all processes below it; shared pages are counted once (PSS)."""
    services = running(home)
    tree = processes_of_home(home) + ([psutil.Process(services.pid)] if services is not None else [])
    return sum(_pss_kib(process.pid) for process in tree) / 1024


def _pss_kib(pid: int) -> int:
    """The proportional set size of a process in KiB; 0 once it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


@contextlib.contextmanager
def attached(supervisor: subprocess.Popen[bytes], keep: bool) -> Iterator[None]:
    """Stop the supervisor when this block is left; with `keep`, only when it is left by a failure."""
    try:
        yield
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            stop_child(supervisor, STOPS_WITHIN_S)
