"""What a run asks of MLflow's server, and how long its answers take when many people's runs are logged side by side.

    python -m benchmarks.scale.mlflow_load [--seconds 15] [--no-record]

The server of `draftsmith up`, on SQLite and behind its password, takes a run of fifteen steps, whose requests are kept.
Then 1, 4, 16 and 64 people send them again and again, each as a run of their own, without a pause; before each run they
open the list of the newest runs, as MLflow's page does. The people are threads of one process on the same machine, so
they take a share of its cores; what a request costs the server alone is its processor time.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

import psutil
import requests

from benchmarks.record import ROOT, write_record
from benchmarks.scale.people import BUSY_HOUR, PEOPLE, RUNS_A_DAY, STEPS, pipeline_of
from flows.cli import main as draftsmith
from flows.services.client import LOOPBACK, PASSWORD_VARIABLE

AT_ONCE: Final = (1, 4, 16, 64)
AUTH: Final = ("people", secrets.token_hex(8))
LIST: Final = {"max_results": 100, "order_by": ["attributes.start_time DESC"]}
"""What MLflow's page asks for when a list of runs is opened."""


@dataclass(frozen=True)
class Sent:
    """One request of a run: its body, and the ids that its answer made."""

    method: str
    path: str
    body: bytes
    made: str | None


@dataclass
class Person:
    """Somebody whose runs are logged. Seconds of each request, and of each list of runs."""

    logging: list[float] = field(default_factory=list)
    listing: list[float] = field(default_factory=list)
    runs: int = 0


def main() -> int:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each number of people asks")
    parser.add_argument("--no-record", action="store_true", help="write no file under benchmarks/results")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="draftsmith-mlflow-load-") as folder,
        server(Path(folder)) as (url, process),
    ):
        sent, experiment, run_id = one_run(Path(folder), url)
        by_people = {people: crowd(url, process, sent, experiment, run_id, people, asked.seconds) for people in AT_ONCE}
    busiest = PEOPLE * RUNS_A_DAY * BUSY_HOUR / 3600
    numbers: dict[str, Any] = {
        "steps": STEPS,
        "requests_a_run": len(sent),
        "by_people": by_people,
        "people": PEOPLE,
        "runs_a_day_each": RUNS_A_DAY,
        "requests_a_second_in_the_busiest_hour": round(busiest * len(sent)),
    }
    print(numbers)
    if not asked.no_record:
        print(f"written: {write_record('mlflow-load', numbers).relative_to(ROOT)}")
    return 0


@contextmanager
def server(place: Path) -> Iterator[tuple[str, psutil.Process]]:
    """MLflow's server as `up` starts it: its address and its process."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{place / 'served' / 'mlflow' / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(place / "artifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_SERVER_ALLOWED_HOSTS": "*",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DRAFTSMITH_HOME": str(place / "served"),
        PASSWORD_VARIABLE: ":".join(AUTH),
    }
    environment.pop("MLFLOW_TRACKING_URI", None)
    app = ("--factory", "flows.services.mlflow_server:create_app", "--log-level=warning", f"--port={port}")
    command = [sys.executable, "-m", "uvicorn", *app]
    url = f"http://{LOOPBACK}:{port}"
    with subprocess.Popen(command, env=environment) as running:
        try:
            while running.poll() is None:
                try:
                    requests.get(f"{url}/health", timeout=5).raise_for_status()
                    break
                except requests.RequestException:
                    time.sleep(0.5)
            assert running.poll() is None, "MLflow's server has ended; it said why"
            yield url, psutil.Process(running.pid)
        finally:
            running.terminate()


def one_run(place: Path, url: str) -> tuple[list[Sent], str, str]:
    """What a run of STEPS steps asks of the server, the experiment that it is in, and our id of it."""
    sent: list[Sent] = []
    send = requests.Session.send

    def kept(session: requests.Session, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        if request.body is not None and not isinstance(request.body, bytes | str):  # a file that is uploaded
            request.body = request.body.read()
        body = request.body.encode() if isinstance(request.body, str) else request.body or b""
        answer = send(session, request, **options)
        made = answer.json()["run"]["info"]["run_id"] if str(request.path_url).endswith("runs/create") else None
        if not str(request.path_url).endswith("experiments/create"):  # which only the first run of a pipeline asks for
            sent.append(Sent(str(request.method), str(request.path_url), body, made))
        return answer

    os.environ |= {
        "DRAFTSMITH_HOME": str(place / "home"),
        "MLFLOW_TRACKING_URI": url,
        "MLFLOW_TRACKING_USERNAME": AUTH[0],
        "MLFLOW_TRACKING_PASSWORD": AUTH[1],
    }
    file = pipeline_of(place, STEPS, number=0)
    requests.Session.send = kept  # type: ignore[method-assign]
    try:
        assert draftsmith(["run", "-f", str(file), "--direct", f"of-{STEPS}"]) == 0
    finally:
        requests.Session.send = send  # type: ignore[method-assign]
    (journal,) = (place / "home" / "runs").glob("*.jsonl")
    experiment = requests.get(
        f"{url}/api/2.0/mlflow/experiments/get-by-name", {"experiment_name": f"of-{STEPS}"}, auth=AUTH, timeout=60
    ).json()["experiment"]["experiment_id"]
    return sent, experiment, journal.stem


def crowd(
    url: str, process: psutil.Process, sent: list[Sent], experiment: str, run_id: str, people: int, seconds: float
) -> dict[str, float]:
    """What so many people saw who sent the requests of runs side by side for some seconds."""
    crowded = [Person() for _ in range(people)]
    begin, spent = threading.Barrier(people), sum(process.cpu_times()[:2])
    began = time.perf_counter()
    with ThreadPoolExecutor(people) as pool:
        work = [
            pool.submit(log_runs, person, url, sent, experiment, run_id, begin, began + seconds) for person in crowded
        ]
        for one in work:
            one.result()
    took, spent = time.perf_counter() - began, sum(process.cpu_times()[:2]) - spent
    logging, listing = ([each for one in crowded for each in getattr(one, of)] for of in ("logging", "listing"))
    number = len(logging) + len(listing)
    return {
        "requests_a_second": round(number / took, 1),
        "ms_p50": round(1e3 * median(logging), 1),
        "ms_p95": round(1e3 * quantiles(logging, n=20)[-1], 1),
        "ms_max": round(1e3 * max(logging), 1),
        "list_ms_p50": round(1e3 * median(listing), 1),
        "list_ms_max": round(1e3 * max(listing), 1),
        "server_cpu_ms_a_request": round(1e3 * spent / number, 1),
        "whole_runs": sum(one.runs for one in crowded),
    }


def log_runs(
    person: Person, url: str, sent: list[Sent], experiment: str, run_id: str, begin: threading.Barrier, until: float
) -> None:
    """Look at the list, log a run, and so on, until the time is over."""
    with requests.Session() as session:
        session.auth = AUTH
        begin.wait()
        while True:
            listed = {**LIST, "experiment_ids": [experiment]}
            person.listing.append(_timed(session, "POST", f"{url}/api/2.0/mlflow/runs/search", json=listed)[0])
            ids = {run_id: f"{run_id}-{secrets.token_hex(6)}"}  # theirs, in the place of those of the run that was kept
            for one in sent:
                path, body = one.path, one.body
                for old, new in ids.items():
                    path, body = path.replace(old, new), body.replace(old.encode(), new.encode())
                took, answer = _timed(
                    session, one.method, url + path, data=body, headers={"Content-Type": "application/json"}
                )
                person.logging.append(took)
                if one.made is not None:
                    ids[one.made] = answer.json()["run"]["info"]["run_id"]
                if time.perf_counter() > until:
                    return
            person.runs += 1


def _timed(session: requests.Session, method: str, url: str, **options: Any) -> tuple[float, requests.Response]:
    began = time.perf_counter()
    answer = session.request(method, url, timeout=300, **options)
    took = time.perf_counter() - began
    answer.raise_for_status()
    return took, answer


if __name__ == "__main__":
    raise SystemExit(main())
