"""Prefect, MLflow, the worker or the run itself killed with SIGKILL: every run ends, nothing is lost, nothing is left.

Three seeded trials here, fifty behind the soak marker (`DRAFTSMITH_SOAK_KILLS`, `DRAFTSMITH_SOAK_SEED` choose others).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from served_home import ENDED, ServedHome, contents, served_home, statuses
from toy_garden import GARDEN

from flows.services.reconcile import RUN_VARIABLE, processes_by

VICTIMS = ("prefect", "mlflow", "worker")
LONGEST_S = 14.0  # from the click to the end of an undisturbed run, about
TOYS = GARDEN.without_step("timed").with_param("steps", default=10).with_setting("draft", pause_s=0.1)
NUM_STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHome]:
    with served_home(tmp_path_factory.mktemp("killed")) as place:
        place.deploy_toys(TOYS.text)
        yield place


def kill(place: ServedHome, victim: str) -> None:
    """SIGKILL to a part of the services, as soon as it is there."""
    deadline = time.monotonic() + 60
    while (pid := place.part(victim).pid) is None:
        assert time.monotonic() < deadline, place.log()
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def grown(home: Path, steps: int) -> list[bytes]:
    """What both methods have grown in so many steps, from the store."""
    files = (files["growth.txt"] for files in contents(home).values() if "growth.txt" in files)
    return sorted(file for file in files if len(file.splitlines()) == steps)


def trial(place: ServedHome, victim: str, after_s: float, steps: int) -> dict[str, Any]:
    """One run with one kill; what it came to. Faults are assertions."""
    restarts = place.part(victim).restarts
    run = place.trigger("garden", {"steps": steps})
    time.sleep(after_s)
    kill(place, victim)
    ended = place.until(run, *ENDED)
    first = ended["state"]["type"]
    if first != "COMPLETED":
        assert first == "CRASHED", ended["state"]  # the way to say: it was killed, retry it
        time.sleep(5)
        place.retry(run)
        ended = place.until(run, "COMPLETED", "FAILED")
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    place.until_restarted(victim, restarts)
    place.until_healthy()
    assert place.processes_of(run) == []
    found = grown(place.home, steps)
    assert len(found) == 2, "both drafts are in the store, once"
    assert all(
        [line.split()[0] for line in file.decode().splitlines()] == list(map(str, range(steps))) for file in found
    )
    begun = statuses(place.home, run)
    made = [step for one in begun for step, status in one.items() if status == "completed"]
    assert len(made) == len(set(made)), f"a finished step was made again: {begun}"
    return {"victim": victim, "after_s": round(after_s, 1), "first_end": first, "begun": len(begun)}


@pytest.mark.system
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_server_or_worker_costs_no_run(place: ServedHome, seed: int) -> None:
    rng = random.Random(seed)
    trial(place, VICTIMS[seed - 1], rng.uniform(0.5, LONGEST_S), steps=10 + seed)


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_a_run_killed_with_its_worker_is_marked_and_its_retry_goes_on(place: ServedHome) -> None:
    run = place.trigger("garden", {"steps": 60})
    until_grown(place, run, 60, lines=20)
    killed_at = time.monotonic()
    victim = min(processes_by(RUN_VARIABLE)[run], key=lambda process: process.create_time())
    kill(place, "worker")
    victim.kill()  # the run itself; its children must die with it
    crashed = place.until(run, "CRASHED", within_s=60)
    assert time.monotonic() - killed_at < 60
    assert "a retry goes on from the finished steps" in crashed["state"]["message"]
    assert place.processes_of(run) == []
    place.until_healthy()
    until_tasks_end(place, run)
    place.retry(run)
    assert place.until(run, "COMPLETED", "FAILED")["state"]["type"] == "COMPLETED"
    first, second = statuses(place.home, run)
    finished = {step for step, status in first.items() if status in ("completed", "reused")}
    assert finished and all(second[step] == "reused" for step in finished)
    assert len(second) == NUM_STEPS


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_a_run_that_outlived_its_worker_can_still_be_cancelled(place: ServedHome) -> None:
    run = place.trigger("garden", {"steps": 900})
    until_grown(place, run, 900, lines=3)
    restarts = place.part("worker").restarts
    kill(place, "worker")
    place.until_restarted("worker", restarts)
    place.until_healthy()
    assert place.run(run)["state"]["type"] == "RUNNING", "a run does not need its worker"
    state = {"type": "CANCELLING", "name": "Cancelling"}
    place.api.post(f"/flow_runs/{run}/set_state", {"state": state})
    assert place.processes_of(run, within_s=15) == []
    place.until(run, "CANCELLED", within_s=45)


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_a_run_whose_worker_died_before_it_began_is_scheduled_again(place: ServedHome) -> None:
    deployment = next(one for one in place.api.post("/deployments/filter", {}) if one["name"] == "garden")
    made = {"parameters": {"steps": 5}, "state": {"type": "PENDING", "name": "Pending"}}
    run = str(place.api.post(f"/deployments/{deployment['id']}/create_flow_run", made)["id"])
    assert place.until(run, "COMPLETED", within_s=400)["state"]["type"] == "COMPLETED"


def until_grown(place: ServedHome, run: str, steps: int, lines: int, within_s: float = 300) -> None:
    """Return once the run is growing a draft of so many steps, which has so many lines by now."""
    place.until(run, "RUNNING", within_s=within_s)
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for file in place.home.glob("partial/*/growth.txt"):
            with suppress(FileNotFoundError):  # finished, and therefore elsewhere
                if lines <= len(file.read_bytes().splitlines()) < steps:
                    return
        time.sleep(0.1)
    raise AssertionError(f"nothing grew in {within_s:.0f} s\n{place.log()}")


def until_tasks_end(place: ServedHome, run: str, within_s: float = 45) -> None:
    """Return once no task run of an ended run says Running."""
    wanted = {"task_runs": {"state": {"type": {"any_": ["RUNNING"]}}}, "flow_runs": {"id": {"any_": [run]}}}
    deadline = time.monotonic() + within_s
    while place.api.post("/task_runs/filter", wanted):
        assert time.monotonic() < deadline, "a task run says Running for ever"
        time.sleep(0.5)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_fifty_kills_cost_no_run(place: ServedHome) -> None:
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    kills = int(os.environ.get("DRAFTSMITH_SOAK_KILLS", "50"))
    seed = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0"))
    rng, started, faults = random.Random(seed), time.monotonic(), []
    done: list[dict[str, Any]] = []
    for number in range(kills):
        victim, after_s = rng.choice(VICTIMS), rng.uniform(0.5, LONGEST_S)
        try:
            done.append(trial(place, victim, after_s, steps=20 + number))
        except AssertionError as fault:
            faults.append(f"{victim} after {after_s:.1f} s: {fault}")
    write_record(
        "soak-services",
        {
            "kills": kills,
            "seed": seed,
            "seconds": round(time.monotonic() - started, 1),
            "faults": faults,
            "each_kill": done,
        },
    )
    assert faults == []
