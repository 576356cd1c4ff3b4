"""Where Prefect's server is: the one that somebody runs, that of `draftsmith up`, or one for the time of a run.

Prefect reads its settings once, when it is imported. So this module imports none of it, and whatever does is imported
when `prepare` or `prefect_server` has run.

Prefect can start a temporary server by itself, but that one outlives a killed run: an orphan of 250 MB for each kill.
Ours is the same (its app under uvicorn, without UI and scheduler) as a child that Linux ends when its parent dies, with
its database under the home. It answers on loopback only, on a port that was free, to clients with a password made for
it alone: it writes to the database from which `draftsmith up` runs deployments.
"""

from __future__ import annotations

import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from components.files import open_lock, wait_for_lock
from components.source_code import import_to_stay
from flows.services.child import end_with, stop
from flows.services.client import QUIET, client_environment, running
from storage.redaction import without_secrets

START_TIMEOUT_S = 240.0  # 12-27 s on a busy machine, most of it imports and, the first time, migrations
STOP_TIMEOUT_S = 20.0
ANSWERS_WITHIN_S = 5.0


def prepare(home: Path) -> str:
    """Set Prefect's environment and return the address of its server, "" where none answers.

    The server at $PREFECT_API_URL comes first, then the one of `draftsmith up`.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the terminal has our own progress
    place = Path(os.environ.setdefault("PREFECT_HOME", str(home / "prefect")))
    place.mkdir(parents=True, exist_ok=True)
    address = os.environ.get("PREFECT_API_URL", "")
    if address and answers(address):
        return address
    services = running(home)
    reachable = services is not None and answers(services.prefect_api_url)
    if address:
        instead = "the one of `draftsmith up`" if reachable else "a temporary one"
        sys.stderr.write(f"no Prefect server answers at {without_secrets(address)}: taking {instead}\n")
    if services is None or not reachable:
        return ""
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    os.environ.update(client_environment(services))
    return services.prefect_api_url


@contextmanager
def prefect_server(home: Path) -> Iterator[TemporaryServer | None]:
    """Prefect's environment with a server: None is one that goes on after the block and whose UI people look at.

    Where none answers, a temporary one runs for the time of the block. It comes up while its caller goes on, who
    calls its `wait` before the first request.
    """
    if prepare(home):
        yield None
        return
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    with closing(TemporaryServer(Path(os.environ["PREFECT_HOME"]))) as server:
        before = {name: os.environ.get(name) for name in server.client_environment}
        os.environ.update(server.client_environment)
        try:
            yield server
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


class TemporaryServer:
    """A server while it runs. Start it early and `wait` late: it takes seconds to come up."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.log = place / "server.log"
        self._lock = open_lock(place / "server.lock")
        wait_for_lock(self._lock)  # until it answers: two first starts must not migrate one database at once
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}/api"
        self._password = f"draftsmith:{secrets.token_urlsafe(24)}"
        self.process = _start(port, self._password, self.log)

    @property
    def client_environment(self) -> dict[str, str]:
        """The environment variables that a client of this server needs."""
        return {"PREFECT_API_URL": self.url, "PREFECT_API_AUTH_STRING": self._password}

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: it ended or did not come up in time; the error names its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(self.url):
            has_ended = self.process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                what = (
                    f"ended with {self.process.returncode}"
                    if has_ended
                    else f"did not answer in {START_TIMEOUT_S:.0f} s"
                )
                raise RuntimeError(f"Prefect's temporary server {what}, see {self.log}; --direct runs without Prefect")
            time.sleep(0.1)
        self._lock.close()

    def close(self) -> None:
        """Stop the server; it saves what it has received first."""
        stop(self.process, STOP_TIMEOUT_S)
        self._lock.close()


def answers(url: str) -> bool:
    """A Prefect server answers at this API address; one that is there and busy is asked three times."""
    for _ in range(3):
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=ANSWERS_WITHIN_S):
                return True
        except urllib.error.HTTPError as error:
            return error.code in (401, 403)  # it is there and wants a password; the client will send it
        except (OSError, ValueError) as error:
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                return False
    return False


def _start(port: int, password: str, log: Path) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    env |= {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    env |= {"PREFECT_SERVER_API_AUTH_STRING": password, "PREFECT_API_AUTH_STRING": password}
    env["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] = f"http://127.0.0.1:{port}"
    env.setdefault("PREFECT_SERVER_DATABASE_TIMEOUT", "60")  # a busy machine holds SQLite's lock for more than ten s
    command = [sys.executable, "-P", __file__, str(os.getpid()), str(port)]
    # a group of its own: Ctrl-C must reach the run first, which then tells the server how it ended
    with log.open("ab") as out:
        return subprocess.Popen(command, env=env, stdout=out, stderr=out, process_group=0)


def _serve(parent: int, port: int) -> None:
    """Be the server, in the child process, for as long as the parent lives."""
    if not end_with(parent, signal.SIGKILL):
        return
    import_to_stay("flows.orchestration.server_app")
    options = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
    sys.argv = ["uvicorn", "--factory", "flows.orchestration.server_app:create_temporary_app", *options]
    runpy.run_module("uvicorn", run_name="__main__")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
