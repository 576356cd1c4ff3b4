"""Does the speedup model say what a user measures? Predicted against measured speedup at every depth of a drafter.

Needs a finished `quickstart` run. One run is what a pipeline does: threads and kernels chosen once, step
costs, the prediction from them and from the acceptance maps, and every depth end to end on the same prompts; nothing is
fitted to what it is compared with. The number is the median over runs of predicted / measured, its interval the middle
of what resampling the runs gives, and beside it stands the widest 95 % interval over prompts of the measured speedup.
Ends with exit code 1 when a depth's median is off by more than 10 %.

    python -m benchmarks.predicted_measured [--home DIR] [--draft KEY ...] [--runs 5] [--prompts 24] [--tokens 96]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.identity import find_drafts
from benchmarks.record import ROOT, write_record
from components.bench import autotune, compare_end_to_end, measure_acceptance, measure_step_cost
from components.bench.machine import describe_machine, num_usable_cores
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.data import collect_prompts
from components.rows import CostCell, read_rows
from components.speedup import choose_depth, confirm_depth
from components.speedup.policy import ALL, read_policy
from storage.artifacts import Store

BOUND = 0.10


@dataclass(frozen=True)
class Seen:
    """One depth in one run."""

    depth_k: int
    predicted: float
    measured: float
    lo: float
    hi: float
    intake_share: float  # of the measured decoding time: the drafter takes the prompt in, which no round's cost holds

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


class Runs:
    """The steps of one benchmark, each in a directory of its own."""

    def __init__(self, root: Path, asked: argparse.Namespace, machine: Machine) -> None:
        self.root, self.asked, self.machine = root, asked, machine
        self.numbers = itertools.count(1)

    def context(self) -> Context:
        """A new one; the key numbers the step."""
        number = next(self.numbers)
        for part in ("out", "scratch"):
            (self.root / str(number) / part).mkdir(parents=True)
        folder = self.root / str(number)
        key = f"{number:064d}"
        return Context(
            key=key, out=folder / "out", scratch=folder / "scratch", seed=number, num_threads=self.asked.threads
        )

    def one(self, target: Target, draft: Draft, prompts: Prompts, acceptance: Measurements) -> list[Seen]:
        """Cost, prediction, measurement: every depth the drafter is trained for."""
        tuning = autotune(target, prompts, ctx=self.context(), machine=self.machine)
        cost = measure_step_cost(target, draft, prompts, tuning, ctx=self.context(), machine=self.machine)
        policy = choose_depth([acceptance], [cost], ctx=self.context())
        end_to_end = compare_end_to_end(
            target,
            [draft],
            prompts,
            policy,
            tuning,
            num_prompts=self.asked.prompts,
            max_new_tokens=self.asked.tokens,
            reps=1,
            depths="all",
            lookup_depths=[],
            loaded_off=False,
            ctx=self.context(),
            machine=self.machine,
        )
        confirmed = confirm_depth(policy, end_to_end, ctx=self.context())
        cells = read_rows(cost.path, CostCell)
        seen = []
        for arm in read_policy(confirmed.path).arms:
            if arm.workload == ALL and arm.depth_k and arm.speedup_pred is not None:
                seconds = arm.num_rounds * (arm.al or 0.0) / arm.tokens_per_s
                share = arm.num_requests * intake_seconds(cells, arm.depth_k) / seconds
                seen.append(Seen(arm.depth_k, arm.speedup_pred, arm.speedup, arm.lo, arm.hi, share))
        return sorted(seen, key=lambda one: one.depth_k)


def intake_seconds(cells: list[CostCell], depth: int) -> float:
    """What a generation's first proposal takes longer than another: the prompt's columns."""
    medians = {
        phase: statistics.median(c.median_ns for c in cells if (c.phase, c.depth_k) == (phase, depth))
        for phase in ("draft", "draft_prefill")
    }
    return max(0.0, medians["draft_prefill"] - medians["draft"]) / 1e9


def row_of(runs: list[Seen]) -> dict[str, Any]:
    """One depth over all runs."""
    ratios = sorted(run.ratio for run in runs)
    resampled = sorted(statistics.median(draw) for draw in itertools.product(ratios, repeat=min(5, len(ratios))))
    cut = int(0.025 * len(resampled))
    return {
        "depth_k": runs[0].depth_k,
        "predicted": statistics.median(run.predicted for run in runs),
        "measured": statistics.median(run.measured for run in runs),
        "measured_lo": min(run.lo for run in runs),
        "measured_hi": max(run.hi for run in runs),
        "ratio": statistics.median(ratios),
        "ratio_lo": resampled[cut],
        "ratio_hi": resampled[-1 - cut],
        "ratios": ratios,
        "intake_share": statistics.median(run.intake_share for run in runs),
    }


def check_drafter(runs: Runs, store: Store, draft: Draft) -> dict[str, Any]:
    """Every run of one drafter; prints a line for each depth."""
    target = store.find(str(draft.info["target_key"]))
    if not isinstance(target, Target):
        raise UserError(f"draft {draft.key[:12]}: its target is not in {store.home / 'store'}: run the pipeline again")
    asked = runs.asked
    num_test = {"num_test": asked.prompts, "num_train": 1, "num_validation": 1}
    prompts = collect_prompts(source="python-stdlib", **num_test, ctx=runs.context())
    acceptance = measure_acceptance(target, draft, prompts, max_new_tokens=asked.tokens, ctx=runs.context())
    found: dict[int, list[Seen]] = {}
    for number in range(asked.runs):
        for seen in runs.one(target, draft, prompts, acceptance):
            found.setdefault(seen.depth_k, []).append(seen)
        print(f"{draft.info['method']}: run {number + 1} of {asked.runs}", flush=True)
    rows = [row_of(found[depth]) for depth in sorted(found)]
    for row in rows:
        print(
            f"  k={row['depth_k']}  predicted {row['predicted']:.3f}  measured {row['measured']:.3f} "
            f"[{row['measured_lo']:.2f}, {row['measured_hi']:.2f}]  ratio {row['ratio']:.3f} "
            f"[{row['ratio_lo']:.3f}, {row['ratio_hi']:.3f}]  prompt intake {row['intake_share']:.1%}"
        )
    return {"method": draft.info["method"], "draft_key": draft.key, "depths": rows}


def main() -> None:
    """Run, print, write the record."""
    parser = argparse.ArgumentParser(description="predicted against measured speedup at every depth")
    parser.add_argument("--home", default=None, help="the home directory of the run (default: $DRAFTSMITH_HOME)")
    parser.add_argument("--draft", action="append", default=[], help="key of a drafter, or its beginning; repeatable")
    parser.add_argument("--runs", type=int, default=5, help="times that cost and end to end are measured")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens for each prompt")
    parser.add_argument("--threads", type=int, default=num_usable_cores(), help="threads that torch may use")
    asked = parser.parse_args()
    store = Store(asked.home)
    drafts = find_drafts(store, asked.draft)
    if not drafts:
        raise SystemExit(f"no drafter in {store.home / 'store'}: run `draftsmith run quickstart` first, or name --home")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), asked, describe_machine("cpu"))
        try:
            results = [check_drafter(runs, store, draft) for draft in drafts]
        except UserError as error:
            raise SystemExit(str(error)) from error
    sizes = {"runs": asked.runs, "prompts": asked.prompts, "max_new_tokens": asked.tokens}
    load = os.getloadavg()[0]
    spent = round(time.perf_counter() - started, 1)
    numbers = {**sizes, "bound": BOUND, "load_average": load, "seconds": spent, "results": results}
    file = write_record("predicted-measured", numbers)
    print(f"written: {file.relative_to(ROOT)}")
    if any(abs(row["ratio"] - 1) > BOUND for result in results for row in result["depths"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
