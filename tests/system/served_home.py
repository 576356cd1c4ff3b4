"""A home with its servers up, as a user has it after `draftsmith up --detach`, and toy pipelines deployed on it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline_builder import pipeline, step

from flows.services.client import ApiError, PrefectApi, Services, running
from flows.services.control import PartState, states
from flows.services.reconcile import RUN_VARIABLE, processes_by
from flows.services.supervisor import processes_of_home

ROOT = Path(__file__).resolve().parents[2]
TOYS = ROOT / "tests" / "flows"
DRAFTSMITH = str(Path(sys.executable).with_name("draftsmith"))
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
QUIET_HOUR = (datetime.now(UTC) + timedelta(hours=12)).hour  # not while the tests run
REAL = pipeline(
    "corpus",
    keys={
        "about": "One real step, every night.",
        "schedules": [{"slug": "nightly", "cron": f"0 {QUIET_HOUR} * * *", "timezone": "UTC"}],
    },
    corpus=step("data.collect_prompts", source="python-stdlib", num_train=24, num_test=4),
)
DEPLOY = """\
import sys
from pathlib import Path
from flows.orchestration.prefect_server import prepare
file, home = Path(sys.argv[1]), Path(sys.argv[2])
assert prepare(home)
from flows.orchestration.deployments import apply_changes, plan_changes
apply_changes(plan_changes(file, home, ("components", "toybox", "decisionbox")))
"""


@dataclass(frozen=True)
class ServedHome:
    """A home, how to talk to its servers, and how to run commands on it."""

    home: Path
    file: Path
    ports: tuple[int, int]
    secret: str  # given to `up` in the environment, as a token for steps would be

    @property
    def environment(self) -> dict[str, str]:
        """What every command on this home is started with."""
        place = self.home.parent / "tmp"  # the lock of the machine lies there: do not wait for measurements of others
        place.mkdir(parents=True, exist_ok=True)
        added = {"DRAFTSMITH_HOME": str(self.home), "HF_TOKEN": self.secret, "COLUMNS": "300", "TMPDIR": str(place)}
        return {**os.environ, **added, "PYTHONPATH": f"{ROOT}{os.pathsep}{TOYS}"}

    def draftsmith(self, *arguments: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
        """The command line, as a user gives it."""
        return subprocess.run(
            [DRAFTSMITH, *arguments],
            env=self.environment,
            cwd=self.home.parent,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def up(self) -> subprocess.CompletedProcess[str]:
        """Bring the servers up and return."""
        return self.draftsmith("up", "--detach", *self.options)

    def up_in_the_foreground(self) -> subprocess.Popen[str]:
        """`up` as one starts it in a terminal of its own."""
        return subprocess.Popen(
            [DRAFTSMITH, "up", *self.options],
            env=self.environment,
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def options(self) -> list[str]:
        """Of `up` for this home."""
        prefect, mlflow = map(str, self.ports)
        return ["-f", str(self.file), "--prefect-port", prefect, "--mlflow-port", mlflow]

    @property
    def services(self) -> Services:
        """Where they answer."""
        found = running(self.home)
        assert found is not None, (self.home / "logs" / "services" / "supervisor.log").read_text()
        return found

    @property
    def api(self) -> PrefectApi:
        """A client of Prefect's server."""
        return PrefectApi(self.services.prefect_api_url, self.services.auth_string)

    def part(self, name: str) -> PartState:
        """What the supervisor says of a part."""
        return next(part for part in states(self.home) if part.name == name)

    def deploy_toys(self, text: str) -> None:
        """Deploy a pipelines file whose steps are those of tests/flows/toybox."""
        file = self.home.parent / "toys.yaml"
        file.write_text(text, encoding="utf-8")
        command = [sys.executable, "-c", DEPLOY, str(file), str(self.home)]
        subprocess.run(command, env=self.environment, check=True, timeout=900)

    def trigger(self, pipeline: str, parameters: Mapping[str, Any]) -> str:
        """Start a run as the UI does; its id."""
        for deployment in self.api.post("/deployments/filter", {}):
            if deployment["name"] == pipeline:
                path = f"/deployments/{deployment['id']}/create_flow_run"
                return str(self.api.post(path, {"parameters": dict(parameters)})["id"])
        raise AssertionError(f"{pipeline} is not deployed")

    def run(self, run_id: str) -> dict[str, Any]:
        """A flow run as the server tells it; {} while the server is away."""
        try:
            return dict(self.api.get(f"/flow_runs/{run_id}"))
        except ApiError:
            return {}

    def until(self, run_id: str, *wanted: str, within_s: float = 400) -> dict[str, Any]:
        """The run once its state is one of these types."""
        deadline = time.monotonic() + within_s
        last: dict[str, Any] = {}
        while time.monotonic() < deadline:
            last = self.run(run_id) or last
            if last and last["state"]["type"] in wanted:
                return last
            time.sleep(0.2)
        raise AssertionError(f"not {wanted} in {within_s:.0f} s: {last.get('state')}\n{self.log()}")

    def retry(self, run_id: str) -> None:
        """What the Retry button of the UI does."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        self.api.post(f"/flow_runs/{run_id}/set_state", {"state": state, "force": True})

    def until_healthy(self, within_s: float = 300) -> None:
        """Return when every part is well again."""
        deadline = time.monotonic() + within_s
        while not (states(self.home) and all(part.healthy for part in states(self.home))):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.2)

    def until_restarted(self, name: str, restarts: int, within_s: float = 120) -> None:
        """Return when the supervisor has started a part more often than that: it notices a death within seconds."""
        deadline = time.monotonic() + within_s
        while self.part(name).restarts <= restarts:
            assert time.monotonic() < deadline, f"{name} was not started again\n{self.log()}"
            time.sleep(0.2)

    def processes_of(self, run_id: str, within_s: float = 30) -> list[int]:
        """Every process of a run that is still there after this time; returns at once when there is none."""
        deadline = time.monotonic() + within_s
        while (found := processes_by(RUN_VARIABLE).get(run_id)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [process.pid for process in found or []]

    def log(self) -> str:
        """What the supervisor has said, its last lines."""
        return (self.home / "logs" / "services" / "supervisor.log").read_text(encoding="utf-8")[-3000:]


@contextmanager
def served_home(folder: Path) -> Iterator[ServedHome]:
    """Servers on free ports for the time of a test module; nothing of them is left after it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "pipelines.yaml"
    file.write_text(REAL.text, encoding="utf-8")
    place = ServedHome(folder / "home", file, (free_port(), free_port()), "hf_token_that_nobody_may_keep")
    try:
        done = place.up()
        assert done.returncode == 0, done.stdout + done.stderr
        yield place
    finally:
        place.draftsmith("down", timeout_s=600)
        left = processes_of_home(place.home)
        for process in left:
            process.kill()
        assert not left, f"`down` left processes: {left}"


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def contents(home: Path) -> dict[str, dict[str, bytes]]:
    """Every file of every artifact but its record and what tells the time, by key."""
    return {
        record.parent.name: {
            file.name: file.read_bytes()
            for file in sorted(record.parent.iterdir())
            if file.name not in ("artifact.json", "span.txt")
        }
        for record in sorted((home / "store").glob("*/artifact.json"))
    }


def statuses(home: Path, run_id: str) -> list[dict[str, str]]:
    """For each time the run was begun: what became of each step, from the journals, oldest first."""
    found = []
    for journal in sorted((home / "runs").glob("*.jsonl")):
        lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines and lines[0].get("flow_run_id") == run_id:
            found.append({line["step"]: line["status"] for line in lines if line["entry"] == "step"})
    return found
