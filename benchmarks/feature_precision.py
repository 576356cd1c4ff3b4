"""What do fp8 features cost in acceptance? The same drafters, trained on the same answers stored as bf16 and as fp8.

The built-in target answers its own prompts once; its hidden states are stored twice; EAGLE-3 and MTP are trained on
both with the same seeds and batches, several seeds each, since one seed's held-out acceptance length differs from
another's by more than fp8 may cost. All are judged on the bf16 features of the same held-out answers, which is what
decoding feeds a drafter: fp8 is a matter of training only.

    python -m benchmarks.feature_precision [--steps 400] [--prompts 640] [--seeds 3] [--threads 2]

Nothing is timed, so it may run beside other work; there one thread is quicker than two that wait for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from benchmarks.record import ROOT, write_record
from components.contract import Context, Features, Target
from components.data import collect_prompts, record_features, write_answers
from components.data.features.format import Example, open_features
from components.drafts import train_draft
from components.drafts.storage.files import open_draft
from components.drafts.training.loop import measure
from components.methods import MethodName
from components.targets import load_target
from components.targets.load import open_target

Stored = Literal["bf16", "fp8"]
METHODS: tuple[MethodName, ...] = ("eagle3", "mtp")


def context(folder: Path, threads: int, seed: int = 0) -> Context:
    """A context with directories of its own."""
    out, scratch = folder / "out", folder / "scratch"
    out.mkdir(parents=True)
    scratch.mkdir()
    return Context(key="", out=out, scratch=scratch, seed=seed, num_threads=threads)


def held_out_examples(features: Features, limit: int) -> list[Example]:
    """Validation conversations with two answer tokens or more."""
    source = open_features(features)
    return source.load_all([row for row in source.rows("validation") if row.num_answer_tokens >= 2][:limit])


def trained(
    target: Target, features: Features, judged_on: list[Example], method: MethodName, steps: int, ctx: Context
) -> float:
    """Held-out acceptance length of a drafter trained on the features, judged on these examples."""
    draft = train_draft(
        target, features, method=method, num_steps=steps, draft_vocab_size=2048, eval_every=50, eval_rows=16, ctx=ctx
    )
    model = open_target(target, kernel="plain")
    opened: Any = open_draft(draft, model)
    return measure(opened, judged_on, opened.num_steps, torch.device("cpu")).total.acceptance_length


def main() -> None:
    """Store, train, judge; print the table and write the record."""
    parser = argparse.ArgumentParser(description="acceptance with features stored as bf16 and as fp8")
    parser.add_argument("--steps", type=int, default=400, help="optimiser steps of each drafter")
    parser.add_argument("--prompts", type=int, default=640, help="training prompts that the target answers")
    parser.add_argument("--seeds", type=int, default=3, help="drafters of each method and storage")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch uses")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        target = load_target(ctx=context(folder / "target", asked.threads))
        prompts = collect_prompts(
            num_train=asked.prompts, num_validation=64, num_test=4, ctx=context(folder / "prompts", asked.threads)
        )
        answers = write_answers(target, prompts, ctx=context(folder / "answers", asked.threads))
        stored = {
            storage: record_features(target, answers, storage=storage, ctx=context(folder / storage, asked.threads))
            for storage in get_args(Stored)
        }
        sizes = {storage: features.info["bytes"] for storage, features in stored.items()}
        judged_on = held_out_examples(stored["bf16"], 64)
        for method in METHODS:
            found: dict[str, list[float]] = {storage: [] for storage in stored}
            for seed in range(asked.seeds):
                for storage, features in stored.items():
                    ctx = context(folder / f"{method}-{storage}-{seed}", asked.threads, seed)
                    found[storage].append(trained(target, features, judged_on, method, asked.steps, ctx))
                    print(f"{method} from {storage}, seed {seed}: held-out AL {found[storage][-1]:.3f}", flush=True)
            differences = [b - a for a, b in zip(found["bf16"], found["fp8"], strict=True)]
            results[method] = {
                "held_out_al": found,
                "fp8_less_bf16": differences,
                "mean_difference": statistics.mean(differences),
                "spread_between_seeds": max(found["bf16"]) - min(found["bf16"]),
            }
            means = ", ".join(f"{storage} {statistics.mean(als):.3f}" for storage, als in found.items())
            print(
                f"{method:8} held-out AL {means}; fp8 - bf16 by seed {[round(d, 3) for d in differences]}", flush=True
            )
    print(f"bytes: {sizes}, fp8 takes {sizes['fp8'] / sizes['bf16']:.3f} of bf16")
    numbers = {**dataclasses.asdict(Asked(asked.steps, asked.prompts, asked.seeds)), "held_out_answers": len(judged_on)}
    file = write_record("feature-precision", {**numbers, "bytes": sizes, "results": results})
    print(f"written: {file.relative_to(ROOT)}")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The size of a run."""

    steps: int
    prompts: int
    seeds: int


if __name__ == "__main__":
    main()
