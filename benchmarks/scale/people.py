"""What a run asks of Prefect's server: requests, and rows in its database, by number of steps.

    python -m benchmarks.scale.people [--no-record]

A server of its own, on SQLite, takes a run of two steps and one of eight. From the two, by arithmetic: what a thousand
people ask of one server. How many requests a second a server takes is not measured here.
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
from pathlib import Path
from typing import Final

import httpx

from benchmarks.record import ROOT, write_record

SIZES: Final = (2, 8)
SETTLES_S: Final = 15.0  # events are written in batches
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


def count(place: Path) -> dict[int, dict[str, int]]:
    """Requests and rows of one run of each size."""
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
            _run(place, environment, 1, number=0)
            found = {}
            for size in SIZES:
                time.sleep(SETTLES_S)
                requests, rows = _requests(log), _rows(place)
                _run(place, environment, size, number=size)
                time.sleep(SETTLES_S)
                found[size] = {"requests": _requests(log) - requests, "rows": _rows(place) - rows}
        finally:
            server.terminate()
    return found


def of_people(by_steps: dict[int, dict[str, int]]) -> dict[str, float]:
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
