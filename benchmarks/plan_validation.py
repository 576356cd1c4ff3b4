"""Does `draftsmith plan --on here` say what steps take? `quickstart` at three sizes, predicted by one, measured at all.

Every size runs in a home of its own, alone on the machine. The home of one size (--by) calibrates; the steps of the
others are then predicted from their settings, as a plan made before they ran would have done. About 25 minutes on two
cores.

    python -m benchmarks.plan_validation [--homes FOLDER] [--by middle]

--homes: where the homes are kept; a size whose run is there already is not run again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, write_record
from flows.commands.plan_on import estimate_run
from flows.planning.machines import HERE, find_machine
from flows.planning.wiring import PACKAGES
from storage.artifacts.store import Store

FILE = ROOT / "pipelines.yaml"
SIZES: dict[str, dict[str, float]] = {
    "small": {"train_steps": 90, "num_prompts": 208, "num_test_prompts": 12, "cost_seconds": 15, "measure_seconds": 20},
    "middle": {
        "train_steps": 180,
        "num_prompts": 416,
        "num_test_prompts": 20,
        "cost_seconds": 25,
        "measure_seconds": 45,
    },
    "large": {
        "train_steps": 450,
        "num_prompts": 832,
        "num_test_prompts": 32,
        "cost_seconds": 40,
        "measure_seconds": 90,
    },
}
WANTED = {"seconds": 0.30, "peak": 0.15}
"""How far a prediction may be from what was measured, as a share of it."""
LOADED = 0.5
"""Load average of a minute above which others use the machine: the record's name then says so."""


def params_of(size: str) -> list[str]:
    """The parameters of a size, NAME=VALUE."""
    return [f"{name}={value}" for name, value in SIZES[size].items()]


def run(size: str, home: Path) -> None:
    """Run quickstart at a size, in its home."""
    options = [word for param in params_of(size) for word in ("-p", param)]
    command = [sys.executable, "-m", "flows.cli", "run", "quickstart", "--direct", "--file", str(FILE), *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "DRAFTSMITH_HOME": str(home)}, check=True)


def measured_in(home: Path) -> dict[str, dict[str, float]]:
    """Step -> seconds and peak resident bytes of the step's process."""
    store, found = Store(home), {}
    for key in store.keys():  # noqa: SIM118 (a store is no mapping)
        record = store.record_of(key)["record"]
        found[record["step"]] = {"seconds": record["seconds"], "peak": record["peak_rss_mib"] * 2**20}
    return found


def compare(by: str, homes: dict[str, Path]) -> list[dict[str, Any]]:
    """A row for each step of each other size."""
    machine, rows = find_machine(HERE, FILE), []
    for size in SIZES:
        if size == by:
            continue
        estimate = estimate_run("quickstart", params_of(size), machine, FILE, Store(homes[by]), PACKAGES)
        measured = measured_in(homes[size])
        for step in estimate.steps:
            facts = measured[step.name]
            row = {"size": size, "step": step.name, "time_by": step.seconds_by}
            row |= {"predicted_seconds": step.seconds, "measured_seconds": facts["seconds"]}
            row |= {"predicted_peak": step.memory_bytes, "measured_peak": facts["peak"]}
            row |= {"seconds": step.seconds / facts["seconds"], "peak": step.memory_bytes / facts["peak"]}
            rows.append(row)
    return rows


def main() -> None:
    """Run what is missing, compare, write the record."""
    parser = argparse.ArgumentParser(description="predicted against measured steps of quickstart")
    parser.add_argument("--homes", type=Path, help="a folder for the homes; left out: a temporary one")
    parser.add_argument("--by", choices=list(SIZES), default="middle", help="the size that calibrates")
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        homes = {size: (asked.homes or Path(scratch)) / size for size in SIZES}
        for size, home in homes.items():
            if not (home / "store").is_dir():
                run(size, home)
        rows = compare(asked.by, homes)
    for row in rows:
        print(
            f"{row['size']:7} {row['step']:20} {row['predicted_seconds']:7.1f} s of {row['measured_seconds']:7.1f}"
            f" ({row['seconds']:.2f})  {row['predicted_peak'] / 2**20:7.0f} MiB of {row['measured_peak'] / 2**20:7.0f}"
            f" ({row['peak']:.2f})  {row['time_by']}"
        )
    within = {what: statistics.fmean(abs(row[what] - 1.0) <= wanted for row in rows) for what, wanted in WANTED.items()}
    print(", ".join(f"{what}: {share:.0%} of steps within {WANTED[what]:.0%}" for what, share in within.items()))
    numbers = {"by": asked.by, "sizes": SIZES, "wanted": WANTED, "within": within, "load_before": load, "steps": rows}
    file = write_record("plan-validation" + ("-loaded" if load > LOADED else ""), numbers)
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
