"""A shared store that vanishes in the middle of a run and comes back: no run stops, and `resync` makes up for it."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from forked import SEED, draftsmith, recorded
from garden_home import NUM_STEPS, answer, database_template, finished_at, made, new_home, run_garden, write_garden
from small_disk import can_mount

OUTAGES = int(os.environ.get("DRAFTSMITH_SOAK_OUTAGES", "12"))
MINUTE_S = 60.0
pytestmark = pytest.mark.skipif(not can_mount(), reason="taking a mounted folder away needs root")
How = Literal["an empty folder", "a file in its place"]


class NetworkFolder:
    """A folder that is mounted from elsewhere, as one on a file server is."""

    def __init__(self, folder: Path) -> None:
        self.server, self.place = folder / "server", folder / "team"
        self.server.mkdir(parents=True)
        self.place.mkdir()

    def appear(self) -> None:
        if self.place.is_file():
            self.place.unlink()
            self.place.mkdir()
        subprocess.run(["mount", "--bind", str(self.server), str(self.place)], check=True)

    def vanish(self, how: How) -> None:
        """What programs find then: the empty folder below the mount, or something that is no folder."""
        subprocess.run(["umount", "--lazy", str(self.place)], check=True)
        if how == "a file in its place" and not any(self.place.iterdir()):
            self.place.rmdir()
            self.place.touch()


@contextmanager
def network_folder(folder: Path) -> Iterator[NetworkFolder]:
    shared = NetworkFolder(folder)
    shared.appear()
    try:
        yield shared
    finally:
        subprocess.run(["umount", "--lazy", str(shared.place)], check=False, capture_output=True)


def outages(folder: Path, number: int, seed: int, seconds: float) -> dict[str, Any]:
    """Each in a home and a store of its own. seconds: how long it is gone after the artifact at which it went."""
    chance, file = random.Random(seed), write_garden(folder)
    template = database_template(folder / "template")
    reference = new_home(folder / "undisturbed", template)
    assert run_garden(reference, file).code == 0
    wanted, faults = made(reference), list[str]()
    for one in range(number):
        how: How = "an empty folder" if one % 2 else "a file in its place"
        after, until = chance.randrange(0, 4), chance.randrange(4, NUM_STEPS + 1)
        name = f"outage {one}: {how} after {after} artifacts"
        with network_folder(folder / f"shared-{one}") as shared:
            ada, bob = (new_home(folder / f"{who}-{one}", template) for who in ("ada", "bob"))
            url = {"DRAFTSMITH_STORE": f"file://{shared.place}"}

            def outage(ada: Path = ada, shared: NetworkFolder = shared, how: How = how) -> None:
                _wait_for(ada, after)  # noqa: B023 (the thread ends within this turn of the loop)
                shared.vanish(how)
                time.sleep(seconds)
                _wait_for(ada, until)  # noqa: B023
                shared.appear()

            weather = threading.Thread(target=outage)
            weather.start()
            first = run_garden(ada, file, **url)
            _finish(weather)
            faults += [f"{name}: {first.fault or first.said[-600:]}"] * (first.code != 0)
            resynced = draftsmith("resync", home=ada, **url)
            faults += [f"{name}: resync: {resynced.fault or resynced.said[-600:]}"] * (resynced.code != 0)
            second = run_garden(bob, file, **url)
            faults += [f"{name}: {second.fault or second.said[-600:]}"] * (second.code != 0)
            if f"{NUM_STEPS} of {NUM_STEPS} steps reused" not in second.said:
                faults.append(f"{name}: the store lacks what ada has made: {second.said[-600:]}")
            for home in (ada, bob):
                found = made(home)
                differ = [path for path in wanted if found.get(path) != wanted[path]]
                faults += [f"{name}: {home.parent.name}: {path} differs" for path in differ]
                runs = answer(home, "SELECT status, count(*) FROM run GROUP BY 1", **url)
                faults += [f"{name}: {home.parent.name} knows the runs {runs}"] * (runs != [["completed", 2]])
    return {"outages": number, "seconds_each": seconds, "faults": faults}


def _wait_for(home: Path, artifacts: int) -> None:
    """Until so many are finished; a run that never gets there fails the campaign by its own time limit."""
    deadline = time.monotonic() + 300.0
    while len(finished_at(home)) < artifacts:
        assert time.monotonic() < deadline, f"{home}: {len(finished_at(home))} artifacts of {artifacts}"
        time.sleep(0.01)


def _finish(thread: threading.Thread) -> None:
    thread.join(600.0)
    assert not thread.is_alive()


def test_a_shared_store_that_vanishes_and_comes_back_costs_nothing(tmp_path: Path) -> None:
    assert outages(tmp_path, 2, seed=1, seconds=0.0)["faults"] == []


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_shared_store_that_is_gone_for_a_minute(tmp_path: Path) -> None:
    found = recorded("vanishing-store", lambda: outages(tmp_path, OUTAGES, SEED, MINUTE_S))
    assert found["faults"] == []
