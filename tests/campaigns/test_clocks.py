"""A clock that stands wrong or jumps changes no result, no duration and not which measurement is the newest."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked import SEED, recorded
from garden_home import NUM_STEPS, answer, database_template, made, new_home, run_garden, write_garden
from toy_garden import COMMAND_LINE, ROOT

JUMPS = int(os.environ.get("DRAFTSMITH_SOAK_CLOCKS", "60"))
WRONG_CLOCK = Path(__file__).with_name("wrong_clock")  # on the path of a process, it makes its clock follow a file
DAY_S = 24 * 3600
OFFSETS = (-400 * DAY_S, -30 * DAY_S, -3600, -5, 5, 3600, 30 * DAY_S, 400 * DAY_S)
"""Seconds by which a clock is wrong: a zone, a battery that is empty, a virtual machine that slept."""
STRANGE_STEPS = "SELECT count(*) FROM v_step WHERE seconds < 0 OR seconds > 600"
STRANGE_RUNS = "SELECT count(*) FROM v_run WHERE ended_at < started_at"
NEWEST = """SELECT count(*) FROM artifact WHERE step LIKE 'timed%' AND session = (
              SELECT max(session) FROM artifact AS same WHERE same.artifact_key = artifact.artifact_key)
            AND (created_at, artifact_key) IN (SELECT (created_at, artifact_key) FROM superseded)"""


def clock_file(folder: Path, offset_s: int) -> Path:
    """What the clock of a process follows, at every look; written anew, the clock jumps."""
    file = folder / "clock"
    beside = folder / "clock.next"
    beside.write_text(str(offset_s))
    beside.replace(file)
    return file


def run_by_the_clock(
    home: Path, file: Path, clock: Path, jumps: list[tuple[int, int]], *options: str
) -> subprocess.CompletedProcess[str]:
    """A run whose clock jumps by the second number when so many artifacts, the first, are finished."""
    environment = {
        **os.environ,
        "DRAFTSMITH_HOME": str(home),
        "TMPDIR": str(home.parent),
        "PYTHONPATH": f"{WRONG_CLOCK}:{ROOT}:{ROOT / 'tests' / 'flows'}",
        "WRONG_CLOCK": str(clock),
    }
    command = [sys.executable, "-c", COMMAND_LINE, "run", "garden", "--direct", "-f", str(file), *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        for artifacts, offset_s in jumps:
            while run.poll() is None and len(list((home / "store").glob("*/artifact.json"))) < artifacts:
                time.sleep(0.02)
            clock_file(clock.parent, offset_s)
        said, _ = run.communicate()
    return subprocess.CompletedProcess(command, run.returncode, said, "")


def clocks_that_jump(folder: Path, num_jumps: int, seed: int) -> dict[str, Any]:
    """Runs whose clock stands wrong from the start, jumps in the middle and again before the next run."""
    chance, file = random.Random(seed), write_garden(folder)
    template = database_template(folder / "template")
    reference = new_home(folder / "undisturbed", template)
    assert run_garden(reference, file).code == 0
    wanted, faults, jumped, homes = made(reference), list[str](), 0, 0
    while jumped < num_jumps:
        home = new_home(folder / f"home-{homes}", template)
        homes += 1
        offsets = [chance.choice(OFFSETS) for _ in range(4)]
        clock = clock_file(home.parent, offsets[0])
        jumps = [(chance.randrange(1, 5), offsets[1]), (chance.randrange(5, 8), offsets[2])]
        first = run_by_the_clock(home, file, clock, jumps)
        clock_file(home.parent, offsets[3])
        again = run_by_the_clock(home, file, clock, [], "--force", "timed")
        jumped += 4
        name = f"home {homes}, offsets {offsets}"
        for done in (first, again):
            if done.returncode != 0 or "Traceback" in done.stdout:
                faults.append(f"{name}: ended with {done.returncode}: {done.stdout[-1000:]}")
        if first.returncode == 0 and "timed[fern]   done" not in again.stdout:
            faults.append(f"{name}: nothing was measured again: {again.stdout[-600:]}")
        faults += [f"{name}: {one} differs" for one in wanted if made(home).get(one) != wanted[one]]
        for sql, what in (
            (STRANGE_STEPS, "steps of a strange duration"),
            (STRANGE_RUNS, "runs that end before they begin"),
            (NEWEST, "measurements that are newest and given up for older ones"),
        ):
            found = answer(home, sql)
            faults += [f"{name}: {found[0][0]} {what}"] * (found != [[0]])
        counted = answer(home, "SELECT count(*), count(DISTINCT artifact_key) FROM artifact")
        faults += [f"{name}: the history holds {counted}"] * (counted != [[NUM_STEPS + 2, NUM_STEPS]])
    return {"jumps": jumped, "homes": homes, "faults": faults}


def test_a_clock_that_jumps_changes_no_result_and_no_duration(tmp_path: Path) -> None:
    found = clocks_that_jump(tmp_path, 8, seed=1)
    assert found["faults"] == []
    assert found["homes"] == 2


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_sixty_jumps(tmp_path: Path) -> None:
    found = recorded("clocks", lambda: clocks_that_jump(tmp_path, JUMPS, SEED))
    assert found["faults"] == []
