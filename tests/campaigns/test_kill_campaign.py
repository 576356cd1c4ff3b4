"""However often a run, or the first start of a database, is killed, nothing finished is lost or made twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import SEED, forked, recorded
from garden_home import NUM_STEPS, answer, database_template, finished_at, made, new_home, run_garden, write_garden
from toy_garden import COMMAND_LINE, ROOT

from storage.registry.tracking import ensure_database, ensure_experiment, open_client

KILLS = int(os.environ.get("DRAFTSMITH_SOAK_GARDEN_KILLS", "400"))
FIRST_STARTS = int(os.environ.get("DRAFTSMITH_SOAK_FIRST_STARTS", "80"))
SERVER_STARTS = int(os.environ.get("DRAFTSMITH_SOAK_SERVER_STARTS", "20"))
ONCE_EACH = "SELECT count(*), count(DISTINCT artifact_key) FROM artifact"
UNENDED = "SELECT count(*) FROM v_run WHERE status = 'running'"


def kill_runs(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Homes one after the other, each run killed until the kills are spent or it got through; then all is compared."""
    file, chance = write_garden(folder), random.Random(seed)
    template = database_template(folder / "template")
    undisturbed = new_home(folder / "undisturbed", template)
    whole = run_garden(undisturbed, file)
    assert whole.code == 0, whole.said
    wanted, faults, kills, homes = made(undisturbed), list[str](), list[float](), 0
    while len(kills) < num_kills:
        home, seen, killed = new_home(folder / f"home-{homes}", template), dict[str, int](), True
        homes += 1
        while killed and len(kills) < num_kills:
            after_s = chance.uniform(0.0, whole.seconds)
            ended = run_garden(home, file, kill_after_s=after_s)
            killed = ended.code == -signal.SIGKILL
            kills += [round(after_s, 3)] * killed
            if not killed and ended.fault:
                faults.append(f"home {homes}: {ended.fault}")
            now = finished_at(home)
            faults += [f"home {homes}: {key[:12]} was made again or lost" for key in seen if now.get(key) != seen[key]]
            seen = now
        last = run_garden(home, file)
        faults += [f"home {homes}: {last.fault or last.said[-300:]}"] * (last.code != 0)
        now = finished_at(home)
        faults += [f"home {homes}: {key[:12]} was made again or lost" for key in seen if now.get(key) != seen[key]]
        found = made(home)
        faults += [
            f"home {homes}: {name} differs"
            for name in wanted.keys() | found.keys()
            if found.get(name) != wanted.get(name)
        ]
        if answer(home, ONCE_EACH) != [[NUM_STEPS, NUM_STEPS]]:
            faults.append(f"home {homes}: the history holds {answer(home, ONCE_EACH)} artifacts")
        if answer(home, UNENDED) != [[0]]:
            faults.append(f"home {homes}: a dead run is still called running")
    return {"kills": len(kills), "homes": homes, "files_compared_each": len(wanted), "faults": faults, "after_s": kills}


def use_database(home: Path) -> int:
    """Make the database or find it, and use it; a fault is an exception."""
    ensure_database(home)
    client = open_client(home)
    run = client.create_run(ensure_experiment(home, client, "garden"))
    client.log_metric(run.info.run_id, "height", 1.0)
    return 0


def kill_first_starts(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """MLflow's database, killed while it is made, again and again on the same home; then it must serve."""
    chance = random.Random(seed)
    (folder / "undisturbed").mkdir(parents=True)
    whole = forked(lambda: use_database(folder / "undisturbed"))
    assert whole.code == 0, whole.said
    kills, faults, homes = 0, list[str](), 0
    while kills < num_kills:
        home = folder / f"home-{homes}"
        home.mkdir()
        homes += 1
        code: int | None = -signal.SIGKILL
        while code == -signal.SIGKILL and kills < num_kills:
            ended = forked(lambda: use_database(home), kill_after_s=chance.uniform(0.0, whole.seconds))  # noqa: B023
            code = ended.code
            kills += code == -signal.SIGKILL
            faults += [f"home {homes}: {ended.fault}"] * bool(code != -signal.SIGKILL and ended.fault)
        last = forked(lambda: use_database(home))  # noqa: B023
        faults += [f"home {homes}: {last.said[-500:]}"] * (last.code != 0)
    return {"kills": kills, "homes": homes, "faults": faults}


def kill_first_servers(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """`draftsmith run` with Prefect, its database first made by it, killed; the next run of that home gets through."""
    chance = random.Random(seed)
    file = write_garden(folder)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'flows'}"}
    command = [sys.executable, "-c", COMMAND_LINE, "run", "garden", "-f", str(file)]
    faults, kills, longest_s = list[str](), 0, 0.0
    for number in range(num_kills + 1):
        home = folder / f"home-{number}"
        told = environment | {"DRAFTSMITH_HOME": str(home)}
        for attempt in range(2) if number else (1,):
            started = time.monotonic()
            process = subprocess.Popen(
                command, env=told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            try:
                said, _ = process.communicate(timeout=600 if attempt else chance.uniform(0.3, longest_s))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                kills += 1
                continue
            longest_s = max(longest_s, time.monotonic() - started)
            if process.returncode != 0:
                faults.append(f"home {number}: ended with {process.returncode}: {said[-500:]}")
        if len(finished_at(home)) != NUM_STEPS:
            faults.append(f"home {number}: {len(finished_at(home))} artifacts of {NUM_STEPS} steps")
    return {"kills": kills, "homes": num_kills + 1, "faults": faults}


def test_ten_kills_of_a_run_lose_nothing(tmp_path: Path) -> None:
    found = kill_runs(tmp_path, 10, seed=1)
    assert found["faults"] == []
    assert found["kills"] == 10 and found["files_compared_each"] == 6


def test_four_kills_of_the_first_start_of_mlflows_database_leave_one_that_serves(tmp_path: Path) -> None:
    found = kill_first_starts(tmp_path, 4, seed=1)
    assert found["faults"] == []
    assert found["kills"] == 4


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_five_hundred_kills(tmp_path: Path) -> None:
    found = recorded(
        "garden-kills",
        lambda: {
            "runs": kill_runs(tmp_path / "runs", KILLS, SEED),
            "first_starts_of_mlflows_database": kill_first_starts(tmp_path / "databases", FIRST_STARTS, SEED),
            "first_starts_of_prefects_server": kill_first_servers(tmp_path / "servers", SERVER_STARTS, SEED),
        },
    )
    assert [part["faults"] for part in found.values()] == [[], [], []]
    assert [part["kills"] for part in found.values()][:2] == [KILLS, FIRST_STARTS]
