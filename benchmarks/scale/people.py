"""What a run asks of Prefect's server: requests, rows in its database and processor time, by number of steps.

    python -m benchmarks.scale.people [--no-record]

A server of its own, on SQLite, takes three runs of two steps and three of eight, in turns; the middle one counts. What
the server spends while nobody asks is taken off. From the two sizes, by arithmetic: what a thousand people ask of one
server, and the runs a second that keep one core of it busy.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import psutil

from benchmarks.record import ROOT, write_record

SIZES: Final = (2, 8)
TURNS: Final = 3
SETTLES_S: Final = 15.0  # events are written in batches
IDLE_S: Final = 60.0
PEOPLE, RUNS_A_DAY, STEPS = 1000, 20, 15
BUSY_HOUR: Final = 0.2
"""Share of a day's runs in its busiest hour; an assumption, as are the runs of a person and the steps of a run."""


def main() -> int:
    """Count, print, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="write no file under benchmarks/results")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-people-") as folder:
        by_steps = count(Path(folder))
    numbers = {"by_steps": by_steps, "people": of_people(by_steps)}
    print(numbers)
    if not asked.no_record:
        print(f"written: {write_record('scale-people', numbers).relative_to(ROOT)}")
    return 0


@dataclass
class Asked:
    """What a server has done so far: requests, rows, seconds of its processes' time, and when that was, in seconds."""

    requests: int
    rows: int
    spent: float
    at: float

    def since(self, before: Asked, idle: float) -> dict[str, float]:
        """What came of one run; idle: seconds of its processes' time a second when nobody asks."""
        spent = self.spent - before.spent - idle * (self.at - before.at)
        return {"requests": self.requests - before.requests, "rows": self.rows - before.rows, "cpu_seconds": spent}


def count(place: Path) -> dict[int, dict[str, float]]:
    """Requests, rows and the server's seconds of a run of each size."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DRAFTSMITH_"))}
    quiet = {"PREFECT_HOME": str(place / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    told = {"PREFECT_SERVER_LOGGING_LEVEL": "INFO", "PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    environment = {**kept, **quiet, **told, "DRAFTSMITH_HOME": str(place / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    log = place / "server.log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file) as server,
    ):
        try:
            _until_it_answers(told["PREFECT_API_URL"], server)
            process = psutil.Process(server.pid)
            _run(place, environment, 1, number=0)
            time.sleep(SETTLES_S)
            before = _asked(log, place, process)
            time.sleep(IDLE_S)
            after = _asked(log, place, process)
            idle = (after.spent - before.spent) / (after.at - before.at)
            by_size: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
            for turn in range(TURNS):
                for size, of_size in by_size.items():
                    before = _asked(log, place, process)
                    _run(place, environment, size, number=size + turn)
                    time.sleep(SETTLES_S)
                    of_size.append(_asked(log, place, process).since(before, idle))
        finally:
            server.terminate()
    return {size: {name: median(one[name] for one in runs) for name in runs[0]} for size, runs in by_size.items()}


def of_people(by_steps: dict[int, dict[str, float]]) -> dict[str, float]:
    """What PEOPLE ask of one server, by a straight line through the two sizes."""
    (few, at_few), (many, at_many) = by_steps.items()

    def at(name: str) -> float:
        return at_few[name] + (at_many[name] - at_few[name]) / (many - few) * (STEPS - few)

    runs_a_day = PEOPLE * RUNS_A_DAY
    busiest = runs_a_day * BUSY_HOUR / 3600
    return {
        "people": PEOPLE,
        "runs_a_day_each": RUNS_A_DAY,
        "steps": STEPS,
        "runs_a_second": round(busiest, 2),
        "requests_a_run": round(at("requests")),
        "requests_a_second": round(busiest * at("requests")),
        "rows_a_run": round(at("rows")),
        "server_cpu_seconds_a_run": round(at("cpu_seconds"), 2),
        "runs_a_second_of_one_core": round(1 / at("cpu_seconds"), 2),
        "million_rows_a_day": round(runs_a_day * at("rows") / 1e6, 1),
        "days_to_ten_million_runs": round(10_000_000 / runs_a_day),
    }


def pipeline_of(place: Path, size: int, *, number: int) -> Path:
    """A pipelines.yaml with one pipeline of so many steps, none of which another number has."""
    line = "      s{i}: {{uses: data.collect_prompts, with: {{source: python-stdlib, {counts}}}}}"
    steps = "\n".join(line.format(i=i, counts=f"num_train: {20 + i}, num_test: {2 + number}") for i in range(size))
    file = place / f"of-{size}.yaml"
    file.write_text(f"pipelines:\n  of-{size}:\n    steps:\n{steps}\n")
    return file


def _run(place: Path, environment: dict[str, str], size: int, *, number: int) -> None:
    """One run of a pipeline of so many steps, none of them in the store before."""
    file = pipeline_of(place, size, number=number)
    command = [sys.executable, "-m", "flows.cli", "run", "-f", str(file), f"of-{size}"]
    subprocess.run(command, env=environment, check=True, capture_output=True, cwd=place)


def _asked(log: Path, place: Path, process: psutil.Process) -> Asked:
    """What the server has done so far."""
    spent = sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))
    return Asked(_requests(log), _rows(place), spent, time.monotonic())


def _requests(log: Path) -> int:
    """Requests in the server's log."""
    return len(re.findall(r'"(?:GET|POST|PUT|PATCH|DELETE) /api/', log.read_text(encoding="utf-8", errors="replace")))


def _rows(place: Path) -> int:
    """Rows of all tables of the server's database."""
    with closing(sqlite3.connect(place / "prefect" / "prefect.db", timeout=60)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return sum(database.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables)


def _until_it_answers(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            httpx.get(f"{url}/health", timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise RuntimeError("Prefect's server has ended; its log says why")


if __name__ == "__main__":
    raise SystemExit(main())
