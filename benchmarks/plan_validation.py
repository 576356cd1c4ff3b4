"""Does `draftsmith plan --on here` say what steps take? `quickstart` at three sizes, predicted by one, measured at all.

Every size runs in a home of its own, alone on the machine. The home of one size (--by) calibrates; the steps of the
others are then predicted from their settings, as a plan made before they ran would have done. About 25 minutes on two
cores.

    python -m benchmarks.plan_validation [--homes FOLDER] [--by middle]
    python -m benchmarks.plan_validation --run HOME --file FILE --pipeline NAME [-p NAME=VALUE ...] --about WORDS

--homes: where the homes are kept; a size whose run is there already is not run again.
--run: the home of one whole run of another pipeline. What a plan in an empty home says of the memory of its steps is
held against it, in a record of its own; --about says of what model.
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
from flows.planning.estimate import RunEstimate
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
LEAST_SECONDS = 1.0
"""Of a step that the table shows."""
LOAD = "load_before"
"""The file of a home that holds the machine's load average of a minute, before its run."""
LOADED = 0.5
"""A load of which others use the machine: the record's name then says so."""


def params_of(size: str) -> list[str]:
    """The parameters of a size, NAME=VALUE."""
    return [f"{name}={value}" for name, value in SIZES[size].items()]


def run(size: str, home: Path) -> None:
    """Run quickstart at a size, in its home."""
    home.mkdir(parents=True)
    (home / LOAD).write_text(str(os.getloadavg()[0]), encoding="utf-8")
    options = [word for param in params_of(size) for word in ("-p", param)]
    command = [sys.executable, "-m", "flows.cli", "run", "quickstart", "--direct", "--file", str(FILE), *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "DRAFTSMITH_HOME": str(home)}, check=True)


def measured_in(home: Path) -> dict[str, dict[str, float]]:
    """Step -> seconds and peak resident bytes of the step's largest process."""
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
        rows += [{"size": size, **row} for row in beside(estimate, measured_in(homes[size]))]
    return rows


def beside(estimate: RunEstimate, measured: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each step that ran: what was said of it, what it took, and the one over the other."""
    rows = []
    for step in estimate.steps:
        if step.name not in measured:
            continue
        facts = measured[step.name]
        row: dict[str, Any] = {"step": step.name, "time_by": step.seconds_by}
        row |= {"predicted_seconds": step.seconds, "measured_seconds": facts["seconds"]}
        row |= {"predicted_peak": step.memory_bytes, "measured_peak": facts["peak"], "parts": step.memory}
        row |= {"seconds": step.seconds / facts["seconds"], "peak": step.memory_bytes / facts["peak"]}
        rows.append(row)
    return rows


def record_run(home: Path, file: Path, pipeline: str, params: list[str], about: str) -> None:
    """Hold what a plan says in an empty home against one run, and write the record."""
    with tempfile.TemporaryDirectory() as empty:
        estimate = estimate_run(pipeline, params, find_machine(HERE, file), file, Store(Path(empty)), PACKAGES)
    rows = beside(estimate, measured_in(home))
    target = max(step.memory.get("target", 0) for step in estimate.steps)
    for row in rows:
        print(f"{row['step']:20} {row['predicted_peak']:14,d} B of {row['measured_peak']:14,.0f}  {row['parts']}")
    numbers = {"about": about, "params": params, "target": target, "load": os.getloadavg()[2], "steps": rows}
    print(f"written: {write_record('own-model', numbers).relative_to(ROOT)}")


def table_of_run(found: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """As `table_of`, of the record of one run: memory alone, since it was taken beside other work."""
    what = (
        f"{found['about']}. What `plan --on here` says of memory before anything was run, beside the peak "
        f"of each step's largest process. The target's weights are {found['target'] / 1e9:.2f} GB."
    )
    rows = []
    for step in found["steps"]:
        parts = sorted(step["parts"].items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts if size > 50e6)
        said, measured = step["predicted_peak"] / 1e9, step["measured_peak"] / 1e9
        rows.append((f"`{step['step']}`", f"{said:.2f}", f"{measured:.2f}", f"{step['peak']:.2f}", named))
    return what, ("step", "said, GB", "measured, GB", "ratio", "parts above 0.05, GB"), rows


def table_of(record: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """What the record says, in words, and the head and rows of its table."""
    within, steps = record["within"], record["steps"]
    what = (
        f"`draftsmith plan quickstart --on here` after a run of its {record['by']} size, held against runs of the "
        f"others (alone on {record['machine']['num_cores']} cores; load before {record['load_before']:.1f}): "
        f"{within['seconds']:.0%} of {len(steps)} times are within {WANTED['seconds']:.0%}, and {within['peak']:.0%} "
        f"of peaks of memory within {WANTED['peak']:.0%}. Steps that measure until they know enough end before their "
        "time is over, or start one more process. Steps of under a second are left out here."
    )
    rows = []
    for step in steps:
        if step["measured_seconds"] < LEAST_SECONDS:
            continue
        times = (f"{step['predicted_seconds']:.0f} of {step['measured_seconds']:.0f}", f"{step['seconds']:.2f}")
        peaks = (f"{step['predicted_peak'] / 2**20:.0f} of {step['measured_peak'] / 2**20:.0f}", f"{step['peak']:.2f}")
        rows.append((step["size"], f"`{step['step']}`", *times, *peaks))
    return what, ("size", "step", "predicted of measured s", "ratio", "predicted of measured MiB", "ratio"), rows


def main() -> None:
    """Run what is missing, compare, write the record."""
    parser = argparse.ArgumentParser(description="predicted against measured steps of quickstart")
    parser.add_argument("--homes", type=Path, help="a folder for the homes; left out: a temporary one")
    parser.add_argument("--by", choices=list(SIZES), default="middle", help="the size that calibrates")
    parser.add_argument("--run", type=Path, metavar="HOME", help="the home of one run of --pipeline")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--pipeline", default="mine")
    parser.add_argument("-p", dest="params", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--about", default="A model of one's own")
    asked = parser.parse_args()
    if asked.run:
        record_run(asked.run, asked.file, asked.pipeline, asked.params, asked.about)
        return
    with tempfile.TemporaryDirectory() as scratch:
        homes = {size: (asked.homes or Path(scratch)) / size for size in SIZES}
        for size, home in homes.items():
            if not (home / "store").is_dir():
                run(size, home)
        load = float(
            (homes[next(iter(SIZES))] / LOAD).read_text(encoding="utf-8")
        )  # each run is a load to the next one
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
