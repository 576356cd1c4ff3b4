"""How long the rehearsal of each recipe takes, for every target that it offers, one after another in fresh homes.

CPU seconds are those of all its processes: beside other work they say what the wall clock cannot. Without a network:

    unshare --net sh -c "ip link set lo up && python -m benchmarks.rehearsals" [--recipes NAME ...] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.record import RESULTS, ROOT, commit, write_record
from flows.services.child import PR_SET_CHILD_SUBREAPER, prctl
from flows.spec.schema import load_spec

FILE: Final = ROOT / "recipes" / "pipelines.yaml"
DEAREST: Final = 3
"""Steps of each rehearsal that the table names."""
_STEP: Final = re.compile(r"(\S+) +(passed|failed|not reached) +(\d+\.\d) s")


def rehearse(recipe: str, model: str) -> dict[str, Any]:
    """One rehearsal in a home of its own: how it ended, its seconds, and those of its steps."""
    load, before, began = os.getloadavg()[0], _cpu_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "flows.cli", "rehearse", recipe, "--file", str(FILE), "-p", f"model={model}"]
        environment = {**os.environ, "DRAFTSMITH_HOME": home}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - began
        with contextlib.suppress(ChildProcessError):  # its fork server outlives it for a moment, and is adopted
            while os.wait():
                pass
        left = sorted(str(path.relative_to(home)) for path in Path(home).rglob("*") if path.is_file())
    steps = {found[1]: (found[2], float(found[3])) for found in map(_STEP.match, done.stdout.splitlines()) if found}
    print(done.stdout, done.stderr, flush=True)
    return {
        "recipe": recipe,
        "model": model,
        "commit": commit(),
        "exit_code": done.returncode,
        "passed": sum(state == "passed" for state, _ in steps.values()),
        "steps": {name: of_step for name, (_, of_step) in steps.items()},
        "seconds": round(seconds, 1),
        "cpu_seconds": round(_cpu_seconds() - before, 1),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        "left_in_home": [name for name in left if not name.startswith("logs/")],
    }


def _cpu_seconds() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table_of(record: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """What the record says, in words, and the head and rows of its table."""
    runs = record["runs"]
    network = "with" if record["network"] else "without"
    loads = [load for run in runs for load in (run["load_before"], run["load_after"])]
    what = (
        f"`draftsmith rehearse` of every recipe and target that it offers, {network} a network, in fresh homes, on "
        f"{record['machine']['num_cores']} cores; load averages before and after were {min(loads):.1f} to "
        f"{max(loads):.1f}."
    )
    rows = []
    for run in runs:
        dearest = sorted(run["steps"].items(), key=lambda step: -step[1])[:DEAREST]
        named = ", ".join(f"`{name}` {seconds:.0f}" for name, seconds in dearest)
        passed = f"{run['passed']} of {len(run['steps'])}"
        times = (f"{run['seconds']:.0f}", f"{run['cpu_seconds']:.0f}")
        rows.append((f"`{run['recipe']}`", run["model"], passed, *times, named))
    return what, ("recipe", "target", "steps passed", "seconds", "CPU seconds", "dearest steps, s"), rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Rehearse them and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[])
    parser.add_argument("--models", nargs="+", default=[])
    options = parser.parse_args(arguments)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    runs = [
        rehearse(recipe, str(model))
        for recipe, made in load_spec(FILE).pipelines.items()
        if not options.recipes or recipe in options.recipes
        for model in made.params["model"].choices
        if not options.models or model in options.models
    ]
    assert runs, "no recipe offers that"
    network = any(name != "lo" and state.isup for name, state in psutil.net_if_stats().items())
    today = RESULTS / f"rehearsals-{datetime.now(UTC):%Y-%m-%d}.json"
    before = json.loads(today.read_text(encoding="utf-8"))["runs"] if today.is_file() else []
    made = {(run["recipe"], run["model"]): run for run in (*before, *runs)}  # those not asked for stay as they were
    print(write_record("rehearsals", {"network": network, "runs": list(made.values())}))


if __name__ == "__main__":
    main()
