"""Prefect servers of our own for the tests that need one, and an environment without anybody else's settings."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from flows.orchestration.prefect_server import TemporaryServer, answers
from flows.services.client import QUIET


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment for a home of its own."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "DRAFTSMITH_"))
    }
    return {**kept, "DRAFTSMITH_HOME": str(home), "DO_NOT_TRACK": "true", **more}


@contextmanager
def prefect_server(place: Path) -> Iterator[str]:
    """The API address of a server on a free port; its database and log lie in `place`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"PREFECT_HOME": str(place), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    quiet |= {"PREFECT_SERVER_UI_API_URL": "/api"}  # else the pages ask port 4200, whatever --port says
    quiet |= {"PREFECT_UI_URL": f"http://127.0.0.1:{port}/v2"}  # in links, as `up` has it
    quiet |= {"PREFECT_SERVER_DATABASE_TIMEOUT": "60"}  # a busy machine holds SQLite's lock for more than ten seconds
    quiet |= {"PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "600"}  # as `up` has it, and for the same reason
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-m", "flows.services.child", str(os.getpid()), *command]  # a killed pytest leaves none
    place.mkdir(parents=True, exist_ok=True)
    with (place / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment(place, **quiet), stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}/api"
    try:
        for _ in range(360):
            if answers(url):
                break
            assert process.poll() is None, (place / "log").read_text()
            time.sleep(0.5)
        yield url
    finally:
        end(process)


@contextmanager
def temporary_server(place: Path) -> Iterator[TemporaryServer]:
    """The temporary server of a run, once it answers; `place` is Prefect's home for as long as it runs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PREFECT_HOME": str(place)}.items():
            patch.setenv(name, value)
        with closing(TemporaryServer(place)) as started:
            started.wait()
            yield started


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its group; the one that does not listen is killed: what a test asks is asserted before."""
    with suppress(ProcessLookupError):  # it has ended by itself, with all that it started
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
