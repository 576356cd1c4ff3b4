"""How long do 2,000 bootstrap replicates over 500 prompts x 16 depths take, and the whole choice around them?

Simulated prompts (the work does not depend on what they say). Three parts are timed apart: the resampling itself
(draws of prompts, pooled acceptance length at every depth and of plain decoding, draws of processes, speedups), the
intervals and rows of every depth with the choice, and for scale the replay of the maps that comes before. Medians of
the repetitions, wall clock and CPU. Ends with exit code 1 when the first two take more than 2 seconds together.

    python -m benchmarks.bootstrap [--repetitions 7] [--prompts 500] [--depths 16] [--draws 2000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import ROOT, write_record
from components.rows import AcceptanceMap, PredictionKey
from components.speedup.prediction.costs import CostTable, StepTimes, cost_curve, exact_table
from components.speedup.prediction.predict import Rule, Speeds, choice_row, depth_rows, predict
from components.speedup.prediction.replay import Counts, replay_counts

LIMIT_S = 2.0
NUM_PROCESSES = 3
WHO = PredictionKey("", "", "", "simulated", "all", 1)


def simulated_maps(num_prompts: int, num_depths: int) -> list[AcceptanceMap]:
    """Answers of 256 tokens whose drafts are kept with a probability of the prompt's own."""
    rng = np.random.default_rng(0)
    maps = []
    for number in range(num_prompts):
        kept = rng.random((255, num_depths)) < rng.beta(6.0, 3.0)
        accepted = np.cumprod(kept, axis=1).sum(axis=1).tolist()
        name = f"prompt-{number:04d}"
        maps.append(
            AcceptanceMap("", "", "simulated", name, "all", num_depths, num_depths, 256, accepted, [], 0.0, "float32")
        )
    return maps


def cost_table(num_depths: int) -> CostTable:
    """Three processes: 10 ms a plain step, 11 ms and 0.5 ms a row for verification, 1 ms a draft, 2 % apart."""
    rng = np.random.default_rng(1)
    depths = np.arange(1, num_depths + 1)
    logs = np.log((11.0 + 1.5 * depths) / 10.0)[:, None] + 0.02 * rng.standard_normal((num_depths, NUM_PROCESSES))
    curve = cost_curve(depths.tolist(), logs)
    verify, nothing = np.concatenate([[1.0], np.exp(curve.log_ratio)]), np.zeros(num_depths + 1)
    table = exact_table([0, *depths.tolist()], StepTimes(np.array(1.0), verify, nothing, nothing))
    return table._replace(
        process=np.concatenate([np.zeros((1, curve.process.shape[1])), curve.process]),
        process_dof=np.concatenate([[np.inf], curve.dof]),
        num_shared=NUM_PROCESSES,
        num_processes=NUM_PROCESSES,
    )


def main() -> None:
    """Time it, print, write the record."""
    parser = argparse.ArgumentParser(description="the joint bootstrap over prompts and processes")
    parser.add_argument("--repetitions", type=int, default=7, help="how often each part is timed")
    parser.add_argument("--prompts", type=int, default=500, help="prompts that are resampled")
    parser.add_argument("--depths", type=int, default=16, help="drafting depths")
    parser.add_argument("--draws", type=int, default=2000, help="bootstrap replicates")
    asked = parser.parse_args()
    rule = Rule(tolerance=0.01, confidence=0.95, num_draws=asked.draws, include_host=True)
    maps = simulated_maps(asked.prompts, asked.depths)
    counts = replay_counts(maps, range(asked.depths + 1))
    speeds = resample(counts, rule, asked.depths)
    parts: dict[str, Callable[[], Any]] = {
        "replay": lambda: replay_counts(maps, range(asked.depths + 1)),
        "resample": lambda: resample(counts, rule, asked.depths),
        "intervals_and_choice": lambda: judge(speeds, rule, asked.depths),
    }
    numbers: dict[str, Any] = {"prompts": asked.prompts, "depths": asked.depths, "draws": asked.draws}
    for name, part in parts.items():
        numbers[name] = timed(part, asked.repetitions)
        print(f"{name:22} {numbers[name]['wall_s']:.3f} s, {numbers[name]['cpu_s']:.3f} s of CPU")
    total = numbers["resample"]["wall_s"] + numbers["intervals_and_choice"]["wall_s"]
    numbers |= {"bootstrap_s": round(total, 4), "limit_s": LIMIT_S, "within": total <= LIMIT_S}
    print(f"bootstrap and choice   {total:.3f} s, at most {LIMIT_S:g} s is asked")
    print(f"written: {write_record('bootstrap', numbers).relative_to(ROOT)}")
    if total > LIMIT_S:
        raise SystemExit(1)


def resample(counts: Counts, rule: Rule, num_depths: int) -> Speeds:
    """The draws: prompts and blocks, acceptance length and speedup of every depth."""
    return predict(counts.tokens, counts.rounds, cost_table(num_depths), "all", rule, 0)


def judge(speeds: Speeds, rule: Rule, num_depths: int) -> None:
    """Intervals, P(best), regret and the choice."""
    depth_rows(speeds, cost_table(num_depths), WHO)
    choice_row(speeds, WHO, rule)


def timed(part: Callable[[], Any], repetitions: int) -> dict[str, float]:
    """Median wall clock and CPU seconds."""
    walls, cpus = [], []
    for _ in range(repetitions):
        wall, cpu = time.perf_counter(), time.process_time()
        part()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "wall_s": round(statistics.median(walls), 4),
        "wall_s_worst": round(max(walls), 4),
        "cpu_s": round(statistics.median(cpus), 4),
    }


if __name__ == "__main__":
    main()
