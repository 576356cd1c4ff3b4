"""A Prefect server, a worker and their company of deploy/compose.yaml on a home of their own, with toy pipelines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.services.client import healthy

ROOT = Path(__file__).resolve().parents[2]
TOYS = ROOT / "tests" / "flows"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Stand:
    """What a test needs to know of it: the API, the pages, the folder of the pipelines file, the home."""

    def __init__(self, api: str, folder: Path, env: dict[str, str]) -> None:
        self.api, self.pages, self.folder, self.env = api, api.removesuffix("/api"), folder, env
        self.file, self.home = folder / "pipelines.yaml", folder / "home"

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One question to the API. A busy server is asked again, as our own client does.

        503: SQLite is locked. 500: all its connections wait for that lock.
        """
        data = json.dumps(body).encode() if body is not None else None
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.api + path, data, headers, method=method)
        deadline = time.monotonic() + 600
        while True:
            try:
                with urllib.request.urlopen(request) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code not in (500, 503) or time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def deploy(self) -> str:
        """`draftsmith deploy`; what it says."""
        command = [sys.executable, "-m", "flows.cli", "deploy", "--file", str(self.file)]
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deployment(self, name: str) -> str:
        """The id of a pipeline's deployment."""
        return str(self.ask("GET", f"/deployments/name/{name}/{name}")["id"])

    def start(self, name: str, **parameters: Any) -> str:
        """Start a run as the UI does; its id."""
        path = f"/deployments/{self.deployment(name)}/create_flow_run"
        return str(self.ask("POST", path, {"parameters": parameters})["id"])

    def run(self, identity: str) -> dict[str, Any]:
        """A flow run as it is now."""
        return dict(self.ask("GET", f"/flow_runs/{identity}"))

    def tasks_of(self, identity: str) -> list[dict[str, Any]]:
        """The task runs of a flow run."""
        return list(self.ask("POST", "/task_runs/filter", {"flow_runs": {"id": {"any_": [identity]}}}))

    def runs_of(self, name: str) -> list[dict[str, Any]]:
        """All flow runs of a pipeline, oldest first."""
        return list(self.ask("POST", "/flow_runs/filter", {"flows": {"name": {"any_": [name]}}, "sort": "ID_DESC"}))[
            ::-1
        ]

    def wait(self, identity: str, *types: str, timeout_s: float = 900.0) -> dict[str, Any]:
        """The run once its state has one of these types (by default: it has ended)."""
        deadline = time.monotonic() + timeout_s
        while (run := self.run(identity))["state"]["type"] not in (types or ENDED):
            assert time.monotonic() < deadline, f"{run['name']} is {run['state']['name']} after {timeout_s:g} s"
            time.sleep(0.3)
        return run


@contextmanager
def prefect_stand(folder: Path, pipelines: str) -> Iterator[Stand]:
    """Everything up and deployed; all of it ends with the block."""
    from compose_services import SERVICES, filled_in
    from prefect_server import end, environment, prefect_server
    from served_home import free_port

    health = free_port()
    (folder / "pipelines.yaml").write_text(pipelines)
    (folder / "tmp").mkdir()  # the lock of the machine lies there: do not wait for measurements of others
    with prefect_server(folder / "server") as api:
        env = environment(
            folder / "home",
            PREFECT_API_URL=api,
            PREFECT_UI_URL=f"{api.removesuffix('/api')}/v2",  # as `up` has it
            PREFECT_HOME=str(folder / "prefect"),
            PYTHONPATH=os.pathsep.join([str(ROOT), str(TOYS)]),
            DRAFTSMITH_PACKAGES="toybox,decisionbox",
            DRAFTSMITH_PIPELINES=str(folder / "pipelines.yaml"),
            TMPDIR=str(folder / "tmp"),
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            PREFECT_WORKER_WEBSERVER_PORT=str(health),
            PREFECT_CLIENT_RETRY_EXTRA_CODES="500",  # as `up` has it
            PREFECT_WORKER_CANCELLATION_POLL_SECONDS="5",  # else 120 s where the worker's web socket is down
        )
        stand = Stand(api, folder, env)
        parts = []
        try:
            for name in ("worker", "watch", "reconcile"):
                command = filled_in(SERVICES[name]["command"], {})
                with (folder / f"{name}.log").open("w") as log:
                    there = {"cwd": folder, "env": env, "stdout": log, "stderr": log}
                    parts.append(subprocess.Popen(command, start_new_session=True, **there))
            while not healthy(f"http://127.0.0.1:{health}/health"):  # it deploys before it starts
                assert parts[0].poll() is None, (folder / "worker.log").read_text()
                time.sleep(0.3)
            yield stand
        finally:
            for part in parts:
                end(part)
