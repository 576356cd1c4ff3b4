"""Killed at random moments, finished datasets, answers and features are byte for byte those of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

KILLS = int(os.environ.get("DRAFTSMITH_SOAK_DATA_KILLS", "20"))
SEED = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0"))
PROGRAM = Path(__file__).with_name("killed_data.py")


def campaign(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    paths = os.pathsep.join([str(PROGRAM.parent), str(PROGRAM.parents[1])])
    command = [sys.executable, str(PROGRAM), str(folder), str(num_kills), str(seed)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_three_kills_change_no_byte_of_dataset_answers_and_features(tmp_path: Path) -> None:
    found = campaign(tmp_path, 3, seed=1)
    assert found["faults"] == []
    assert len(found["kills"]) == 3 and found["files"] > 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_change_no_byte_of_dataset_answers_and_features(tmp_path: Path) -> None:
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    started = time.monotonic()
    found = campaign(tmp_path, KILLS, SEED)
    each = {"each_kill": found.pop("kills")}
    seconds = round(time.monotonic() - started, 1)
    write_record(
        "soak-data-kills", {"kills": len(each["each_kill"]), "seed": SEED, **found, "seconds": seconds, **each}
    )
    assert len(each["each_kill"]) == KILLS
    assert found["faults"] == []
