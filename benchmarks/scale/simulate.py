"""Drafters for 8B, 70B and 1T targets on 100,000 to a million conversations, simulated: hours, bottleneck, failures.

    python -m benchmarks.scale.simulate [--no-record]

Hidden states are either streamed from engines to trainers or stored first. Beside it, by arithmetic from the newest
record of the history: ten million runs, and what a thousand people ask of one Prefect. It needs the extra `scale`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Final

from benchmarks.record import RESULTS, ROOT, write_record
from benchmarks.scale.factory import Cluster, Outcome, best_split, stored, streamed
from benchmarks.scale.shapes import SHAPES

TOKENS_A_CONVERSATION: Final = 1000
EPOCHS: Final = 3
CONVERSATIONS: Final = (100_000, 1_000_000)
GPUS: Final = {"8B": (8, 64), "70B": (8, 64), "1T MoE": (32, 256)}
WAYS: Final = {"streamed": streamed, "stored": stored}
NEVER: Final = 1e12
SEED: Final = 18
RUNS: Final = 10_000_000


def main() -> int:
    """Simulate, print, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-record", action="store_true", help="write no file under benchmarks/results")
    asked = parser.parse_args()
    runs = []
    for run in scenarios():
        runs.append(run)
        where = "{target:>7} {conversations:>9,} {gpus:>4} GPUs {way:<9}".format(**run)
        print(where + "{hours:>9.1f} h {stored_tb:>6.1f} TB  {bottleneck}".format(**run))
    numbers = {
        "simulated": True,
        "seed": SEED,
        "tokens_a_conversation": TOKENS_A_CONVERSATION,
        "epochs": EPOCHS,
        "assumed": asdict(Cluster()),
        "targets": {name: _costs(name) for name in SHAPES},
        "runs": runs,
        "growth": list(growth()),
        "failures": list(failures()),
        "history": history_of(RUNS),
    }
    for part in ("growth", "failures"):
        for row in numbers[part]:
            print(part, row)
    print(numbers["history"])
    if not asked.no_record:
        print(f"written: {write_record('scale-simulation', numbers).relative_to(ROOT)}")
    return 0


def scenarios() -> Iterator[dict[str, Any]]:
    """Every target, size, number of GPUs and way."""
    for name in SHAPES:
        for conversations in CONVERSATIONS:
            for gpus in GPUS[name]:
                for way in WAYS:
                    yield scenario(name, conversations, gpus, way)


def scenario(name: str, conversations: int, gpus: int, way: str, cluster: Cluster | None = None) -> dict[str, Any]:
    """One simulated training."""
    cluster = cluster or Cluster()
    tokens, run = float(conversations * TOKENS_A_CONVERSATION), WAYS[way]
    made = run(SHAPES[name], cluster, gpus, tokens, EPOCHS, SEED)
    place = {"target": name, "conversations": conversations, "gpus": gpus, "way": way}
    _, trainers = best_split(SHAPES[name], cluster, gpus)
    split = {"engine_gpus": gpus - trainers, "trainer_gpus": trainers} if way == "streamed" else {}
    expected = made.hours * gpus / cluster.gpu_hours_between_failures
    return place | split | _numbers(made) | {"expected_failures": round(expected, 3)}


def _numbers(made: Outcome) -> dict[str, Any]:
    return {
        "hours": round(made.hours, 2),
        "bottleneck": made.bottleneck,
        "busy": {name: {part: round(share, 3) for part, share in one.items()} for name, one in made.busy.items()},
        "failures": made.failures,
        "repeated_tokens": made.repeated_tokens,
        "moved_tb": round(made.moved_bytes / 1e12, 2),
        "stored_tb": round(made.stored_bytes / 1e12, 2),
    }


def growth() -> Iterator[dict[str, Any]]:
    """A million conversations of the 8B target on ever more GPUs: where more of them stop helping."""
    for gpus in (8, 32, 128, 512):
        for way in WAYS:
            found = scenario("8B", CONVERSATIONS[-1], gpus, way)
            yield {key: found[key] for key in ("gpus", "way", "hours", "bottleneck", "busy")}


def failures() -> Iterator[dict[str, Any]]:
    """What dying costs a streamed training of the 70B target's drafter, by how often and by the checkpoints between."""
    shape, tokens = SHAPES["70B"], float(CONVERSATIONS[-1] * TOKENS_A_CONVERSATION)
    calm = Cluster(gpu_hours_between_failures=NEVER)
    for often in (10, 100, 1000):
        for every_s in (60.0, 600.0, 3600.0):
            mean = Cluster().gpu_hours_between_failures / often
            cluster = Cluster(gpu_hours_between_failures=mean, checkpoint_every_s=every_s)
            at_rest = streamed(shape, replace(calm, checkpoint_every_s=every_s), 64, tokens, EPOCHS).hours
            made = [streamed(shape, cluster, 64, tokens, EPOCHS, seed) for seed in range(6)]
            yield {
                "times_as_often": often,
                "checkpoint_every_s": every_s,
                "hours_without": round(at_rest, 2),
                "hours": round(fmean(one.hours for one in made), 2),
                "failures": round(fmean(sum(one.failures.values()) for one in made), 2),
                "repeated_tokens": round(fmean(one.repeated_tokens for one in made)),
            }


def _costs(name: str) -> dict[str, float]:
    shape = SHAPES[name]
    return {
        "feature_bytes": shape.feature_bytes,
        "draft_params": shape.draft_params,
        "training_gflop": round(shape.training_flops / 1e9, 1),
        "engine_gpus": shape.gpus,
        "engine_tokens_per_s": round(shape.engine_tokens_per_s),
        "trainer_tokens_per_s": round(shape.trainer_tokens_per_s),
    }


def history_of(runs: int) -> dict[str, Any]:
    """A history of so many runs, from the record of a smaller one: bytes and rows grow with runs, and so does the part
    of a query's time that the quickest query does not have. Nothing of this was measured."""
    found = json.loads(max(RESULTS.glob("history-20*.json")).read_text(encoding="utf-8"))
    times = found["query_ms_p50"]
    least, slowest, many = min(times.values()), max(times.values()), runs / found["runs"]
    keys = found["rows"]["artifact"] / found["runs"]
    return {
        "runs": runs,
        "of_record": found["runs"],
        "gigabytes": round(found["megabytes"] * many / 1000, 1),
        "round_rows": int(found["rows"]["round"] * many),
        "slowest_query_s": round((least + (slowest - least) * many) / 1000, 1),
        "runs_within_the_limit": round(found["runs"] * (found["limit_ms"] - least) / (slowest - least)),
        "key_file_gb": round(keys * runs * 65 / 1e9, 2),
    }


if __name__ == "__main__":
    raise SystemExit(main())
