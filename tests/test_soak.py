"""Fifty SIGKILLs over the tiny main job: nothing finished is lost or made twice, and weights repeat bit for bit.

A long campaign, run by `make soak`; it leaves its record in benchmarks/results/. DRAFTSMITH_SOAK_KILLS and
DRAFTSMITH_SOAK_SEED choose another number of kills and other moments. Leave the code alone while it runs: an edit gives
steps new keys.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import KILLED, NUM_STEPS, artifacts, draftsmith, draftsmith_killed, finished_at, write_pipeline

KILLS = int(os.environ.get("DRAFTSMITH_SOAK_KILLS", "50"))
SEED = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0"))
REPEATING = ("Prompts", "Conversations", "Features", "Draft")
"""Kinds whose tensors and prompts must be the same bit for bit, however often the run was killed."""


def contents(home: Path) -> dict[str, bytes]:
    """Tensor files and prompts of every finished artifact whose kind must repeat, by "key/name"."""
    found = {}
    for key, record in artifacts(home).items():
        if record["kind"] in REPEATING:
            for file in sorted((home / "store" / key).iterdir()):
                if file.suffix == ".safetensors" or file.name == "prompts.jsonl":
                    found[f"{key}/{file.name}"] = file.read_bytes()
    return found


class Campaign:
    """Homes one after the other: each is killed until its run gets through, then it must equal the undisturbed one."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.folder, self.arguments = folder, ["run", "tiny", "--direct", "--file", str(file)]
        self.kills: list[dict[str, Any]] = []
        self.faults: list[str] = []
        self.num_homes = 0
        started = time.monotonic()
        self.reference = self._complete(folder / "undisturbed")
        self.undisturbed_s = time.monotonic() - started
        # what fails above fails the test at once: without a reference there is nothing to compare with
        assert self.faults == [] and sum("model.safetensors" in name for name in self.reference) == 2

    def run(self, num_kills: int, chance: random.Random) -> None:
        """Kill `num_kills` times at moments drawn from `chance`, and see every home through."""
        while len(self.kills) < num_kills:
            home = self.folder / f"home-{self.num_homes}"
            self.num_homes += 1
            seen: dict[str, int] = {}
            killed = True
            while killed and len(self.kills) < num_kills:
                after_s = chance.uniform(0.5, 0.4 * self.undisturbed_s)
                code = draftsmith_killed(home, after_s, *self.arguments)
                killed = code == KILLED
                if code not in (KILLED, 0):
                    self.faults.append(f"{home.name}: ended by itself with {code}")
                seen = self._unrepeated(home, seen)
                if killed:
                    self.kills.append({"home": self.num_homes, "after_s": round(after_s, 2), "finished": len(seen)})
            found = self._complete(home)
            self._unrepeated(home, seen)
            differ = sorted(name for name in self.reference if found.get(name) != self.reference[name])
            self.faults += [f"home {self.num_homes}: {name} differs from the undisturbed run" for name in differ]

    def _complete(self, home: Path) -> dict[str, bytes]:
        """Run to the end without a kill; gives the contents that must repeat."""
        done = draftsmith(home, *self.arguments)
        if done.returncode != 0:
            self.faults.append(f"{home.name}: ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        if len(artifacts(home)) != NUM_STEPS:
            self.faults.append(f"{home.name}: {len(artifacts(home))} artifacts of {NUM_STEPS} steps")
        return contents(home)

    def _unrepeated(self, home: Path, seen: dict[str, int]) -> dict[str, int]:
        """When each artifact was finished; one that was finished before and is new or gone is a fault."""
        now = finished_at(home)
        again = [key[:12] for key in seen if now.get(key) != seen[key]]
        self.faults += [f"{home.name}: finished step {key} was lost or made again" for key in again]
        return now


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_no_kill_costs_more_than_time(tmp_path: Path) -> None:
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    started = time.monotonic()
    campaign = Campaign(tmp_path, write_pipeline("llama", tmp_path))
    campaign.run(KILLS, random.Random(SEED))
    write_record(
        "soak-kills",
        {
            "kills": len(campaign.kills),
            "seed": SEED,
            "homes": campaign.num_homes,
            "files_compared_each": len(campaign.reference),
            "undisturbed_run_s": round(campaign.undisturbed_s, 1),
            "seconds": round(time.monotonic() - started, 1),
            "faults": campaign.faults,
            "each_kill": campaign.kills,
        },
    )
    assert len(campaign.kills) == KILLS
    assert campaign.faults == []
