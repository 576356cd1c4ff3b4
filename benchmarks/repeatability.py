"""Is the verdict the same tomorrow, and beside other work? Complete measurements of the same drafters, again and again.

Needs a finished `quickstart` run. Each measurement is one that a pipeline makes (benchmarks/one_measurement.py), in a
process of its own; every second one beside a load that comes and goes on one core (benchmarks/passing_load.py).

The truth that each is held against is that of all of them pooled: per way of drafting the geometric mean of its
measured speedups. Asked of nine in ten: the chosen drafter and depth lose at most 2 % to the best; every measured
speedup lies within 5 % of its pooled mean; the predicted one of the choice within 10 % of the measured; the interval
that is printed holds the pooled value; the gate lets the drafter through, so that it becomes the champion. Ends with
exit code 1 where less is reached. A table says where the variance comes from.

    python -m benchmarks.repeatability [--home DIR] [--runs 10] [--dtype float32] [--cost-seconds S]
                                       [--measure-seconds S]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, write_record
from flows.spec.schema import load_spec
from storage.artifacts.store import default_home

CHOICE, MEASURED, PREDICTED, ASKED = 0.02, 0.05, 0.10, 0.9
Arm = tuple[str, int]  # method, depth


@contextlib.contextmanager
def load(seed: int | None) -> Iterator[None]:
    """Other work beside what runs inside; none without a seed."""
    if seed is None:
        yield
        return
    with subprocess.Popen([sys.executable, "-m", "benchmarks.passing_load", str(seed)], cwd=ROOT) as process:
        try:
            yield
        finally:
            process.kill()


def measure(home: Path, settings: dict[str, Any], log: Path) -> dict[str, Any]:
    """One complete measurement in a process of its own; raises SystemExit with its last words when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.one_measurement", str(home), json.dumps(settings), folder]
        with log.open("a", encoding="utf-8") as errors:
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise SystemExit(f"a measurement failed: {lines[-1] if lines else 'no word'}; see {log}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def pooled_speedups(runs: Sequence[dict[str, Any]]) -> dict[Arm, float]:
    """The geometric mean of what every run measured of an arm, of those that at least half of the runs have."""
    logs: dict[Arm, list[float]] = defaultdict(list)
    for run in runs:
        for arm in run["arms"]:
            if arm["depth_k"]:
                logs[arm["method"], arm["depth_k"]].append(math.log(arm["measured"]))
    return {arm: math.exp(statistics.fmean(of)) for arm, of in logs.items() if 2 * len(of) >= len(runs)}


def judged(run: dict[str, Any], truth: dict[Arm, float]) -> dict[str, Any]:
    """What is asked of one run, with the numbers behind each answer."""
    mine = {(arm["method"], arm["depth_k"]): arm for arm in run["arms"] if (arm["method"], arm["depth_k"]) in truth}
    drafted = {arm: of for arm, of in truth.items() if arm[0] != "ngram"}
    best = max([1.0, *drafted.values()])
    winner = run["winner"]
    chosen = (winner["method"], winner["depth_k"]) if winner is not None else None
    pooled = truth.get(chosen, 1.0) if chosen is not None else 1.0
    worst = max((abs(of["measured"] / truth[arm] - 1.0) for arm, of in mine.items()), default=0.0)
    own = mine.get(chosen) if chosen is not None else None
    first = {(row["method"], row["depth_k"]): row["predicted"] for row in run["predicted"]}
    gap = first[chosen] / own["measured"] - 1.0 if own is not None and chosen in first else None
    return {
        "chosen": None if chosen is None else list(chosen),
        "pooled_of_chosen": pooled,
        "loss": 1.0 - pooled / best,
        "choice": 1.0 - pooled / best <= CHOICE,
        "largest_deviation": worst,
        "measured": worst <= MEASURED,
        "gap": gap,
        "predicted": gap is None or abs(gap) <= PREDICTED,
        "holds": own is None or own["lo"] <= pooled <= own["hi"],
        "champion": run["gate"] is not None and run["gate"]["passed"],
    }


def variance_table(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Standard deviations of a log speedup, in per cent, by where they come from; the mean over arms.

    prompt: of a mean over the prompts of one run. process: of one fresh process about its run. run: of one run beyond
    what its processes explain (kernels, time of day). load: mean of busy runs minus that of quiet ones.
    """
    parts: dict[str, list[float]] = defaultdict(list)
    for arm in pooled_speedups(runs):
        of = [
            next(a for a in run["arms"] if (a["method"], a["depth_k"]) == arm) | {"busy": run["busy"]}
            for run in runs
            if any((a["method"], a["depth_k"]) == arm for a in run["arms"])
        ]
        within = [statistics.variance(one["by_process"]) for one in of if len(one["by_process"]) > 1]
        means = [math.log(one["measured"]) for one in of]
        if not within or len(means) < 2:
            continue
        process, count = statistics.fmean(within), statistics.fmean(len(one["by_process"]) for one in of)
        parts["prompt"].append(statistics.fmean(one["sd_prompts"] for one in of))
        parts["process"].append(math.sqrt(process))
        parts["run"].append(math.sqrt(max(0.0, statistics.variance(means) - process / count)))
        busy = [m for m, one in zip(means, of, strict=True) if one["busy"]]
        quiet = [m for m, one in zip(means, of, strict=True) if not one["busy"]]
        if busy and quiet:
            parts["load"].append(statistics.fmean(busy) - statistics.fmean(quiet))
    table = {name: round(100 * statistics.fmean(of), 2) for name, of in parts.items()}
    return {**table, "kernels": len({run["tuning"]["kernel"] for run in runs}), "arms": len(parts["process"])}


def settings_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The settings of `quickstart`'s measuring steps, with other time budgets where they are asked for."""
    quickstart = load_spec(ROOT / "pipelines.yaml").pipelines["quickstart"]
    values = {f"${{params.{name}}}": param.default for name, param in quickstart.params.items()}

    def own(step: str, seconds: float | None) -> dict[str, Any]:
        told = {name: values.get(str(value), value) for name, value in quickstart.steps[step].settings.items()}
        return {**told, "seconds": seconds or told["seconds"], "dtype": asked.dtype}

    return {"cost": own("step_cost", asked.cost_seconds), "measure": own("end_to_end", asked.measure_seconds)}


def main() -> None:
    """Measure, judge, print, write the record."""
    parser = argparse.ArgumentParser(description="the same decision, measured again and again")
    parser.add_argument("--home", type=Path, default=default_home(), help="the home directory of the run")
    parser.add_argument("--runs", type=int, default=10, help="measurements, every second one beside other work")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--cost-seconds", type=float, default=None, help="time budget of step costs")
    parser.add_argument("--measure-seconds", type=float, default=None, help="time budget of decoding end to end")
    asked = parser.parse_args()
    settings, runs = settings_of(asked), []
    log = Path(tempfile.gettempdir()) / "draftsmith-repeatability.log"
    for number in range(asked.runs):
        seed = number if number % 2 else None
        began = time.monotonic()
        with load(seed):
            found = measure(asked.home, {**settings, "dtype": asked.dtype, "seed": number}, log)
        runs.append({**found, "busy": seed is not None, "total_seconds": round(time.monotonic() - began, 1)})
        said = "busy " if seed is not None else "quiet"
        print(
            f"{number + 1:3d} {said} {runs[-1]['total_seconds']:6.0f} s  {found['verdict']}: {found['reasons'][0]}",
            flush=True,
        )
    truth = pooled_speedups(runs)
    judgements = [judged(run, truth) for run in runs]
    reached = {
        name: sum(one[name] for one in judgements) for name in ("choice", "measured", "predicted", "holds", "champion")
    }
    table = variance_table(runs)
    for arm, speed in sorted(truth.items(), key=lambda pair: -pair[1]):
        print(f"  {arm[0]:<8} k={arm[1]}  pooled {speed:.3f}x")
    for one in judgements:
        print("  " + "  ".join(f"{name} {value}" for name, value in one.items()))
    print(f"of {len(runs)}: {reached}; where the variance comes from, in %: {table}")
    pooled = [{"method": arm[0], "depth_k": arm[1], "speedup": speed} for arm, speed in sorted(truth.items())]
    numbers = {"settings": settings, "pooled": pooled, "reached": reached, "variance": table}
    name = "repeatability" if asked.dtype == "float32" else f"repeatability-{asked.dtype}"
    file = write_record(name, {**numbers, "judgements": judgements, "runs": runs})
    print(f"written: {file.relative_to(ROOT)}")
    if any(count < ASKED * len(runs) for count in reached.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
