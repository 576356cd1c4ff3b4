"""How many tokens a second does training learn from, when batches are padded, bucketed or packed?

Conversations of ragged lengths (log-normal, as chats are: many short ones, a few of thousands of tokens) with random
states of the built-in target's shape. Every mode gets the same conversations, the same seed and the same largest batch,
and does what `train_draft` does in a step: read the rows, pad or pack them, forward, backward, optimiser. Modes take
turns, so that whatever else the machine does meets all alike; the median turn is the number. Tokens are the
conversations' own, padding not counted.

    python -m benchmarks.packing [--methods eagle3 mtp] [--rows 600] [--batch-tokens 2048] [--turns 5] [--steps 12]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save_file

from benchmarks.record import ROOT, write_record
from components.contract import Context, Features
from components.data.features.format import FeatureRow, FeatureSource, open_features
from components.drafts.interface import AbstractDraft
from components.drafts.network.vocabulary import default_size
from components.drafts.storage.files import build_draft
from components.drafts.training.batches import BatchOrder, Packing
from components.drafts.training.optimizer import Optimizer
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

MODES: tuple[Packing, ...] = get_args(Packing)
MEDIAN_TOKENS, SPREAD, SHORTEST, LONGEST = 160, 0.9, 24, 2048
"""Of the lengths: exp(SPREAD * normal) * MEDIAN_TOKENS, cut to SHORTEST .. LONGEST."""


def write_store(folder: Path, target: AbstractTarget, num_rows: int) -> Features:
    """Random conversations, a quarter of each the prompt, and random states that grow from tap to tap."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(num_rows, generator=generator) * SPREAD).exp() * MEDIAN_TOKENS
    lengths = drawn.int().clamp(SHORTEST, LONGEST).tolist()
    hidden, total = target.shape.hidden_size, sum(lengths)
    rows, masks = [], []
    for index, length in enumerate(lengths):
        masks.append(torch.arange(length) >= length // 4)
        row = {"row_id": str(index), "workload": "w", "split": "train", "shard": "shard-00000.safetensors"}
        rows.append({**row, "index": index, "num_tokens": length, "num_answer_tokens": length - length // 4})
    sizes = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(hidden)
    tensors = {
        "ids": torch.randint(0, target.shape.vocab_size, (total,), generator=generator).to(torch.int32),
        "mask": torch.cat(masks),
        "taps": (torch.randn(total, 3 * hidden, generator=generator) * sizes).bfloat16(),
        "last": (torch.randn(total, hidden, generator=generator) * 4).bfloat16(),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    save_file(tensors, folder / "shard-00000.safetensors")
    known = {"target_key": "", "tap_layers": list(target.tap_layers), "vocab_size": target.shape.vocab_size}
    manifest = {**known, "rows": rows, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Features(key="", path=folder)


class Trainer:
    """One drafter that trains in one mode."""

    def __init__(self, draft: AbstractDraft, source: FeatureSource, order: BatchOrder) -> None:
        self.draft, self.source, self.order = draft.train(), source, order
        self.optimizer = Optimizer(draft, "muon", weight_decay=0.01, muon_lr_scale=10.0)
        self.batches: Iterator[list[FeatureRow]] = order.from_step(0)
        self.tokens = self.columns = 0

    def turn(self, steps: int) -> float:
        """Tokens a second over so many optimiser steps."""
        tokens, start = 0, time.perf_counter()
        for _ in range(steps):
            rows = next(self.batches)
            batch = self.order.batch(self.source, rows).to(torch.device("cpu"))
            self.optimizer.update(self.draft.losses(batch).loss, 1e-4, clip_norm=1.0)
            tokens += sum(map(self.order.length, rows))
            self.columns += batch.ids.numel()
        self.tokens += tokens
        return tokens / (time.perf_counter() - start)


def measure(
    target: AbstractTarget, source: FeatureSource, method: str, batch_tokens: int, turns: int, steps: int
) -> dict[str, Any]:
    """All modes in turn with one method."""
    rows = tuple(source.rows("train"))
    draft_ids = torch.arange(default_size(target.shape.vocab_size))
    trainers = {}
    for mode in MODES:
        draft: AbstractDraft = build_draft(method, target, {}, draft_ids)
        draft.scale_to_target_features(source.load(rows[0]).taps)
        trainers[mode] = Trainer(draft, source, BatchOrder(rows, batch_tokens, LONGEST, seed=0, packing=mode))
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for turn in range(turns + 1):  # the first turn warms up
        for mode in sorted(MODES, reverse=bool(turn % 2)):
            speed = trainers[mode].turn(steps)
            if turn:
                speeds[mode].append(speed)
    base = statistics.median(speeds["none"])
    return {
        mode: {
            "tokens_per_second": statistics.median(speeds[mode]),
            "times_as_fast_as_none": statistics.median(speeds[mode]) / base,
            "all_turns": speeds[mode],
            "share_of_columns_used": trainer.tokens / trainer.columns,
            "batches_in_an_epoch": len(trainer.order.epoch(0)),
        }
        for mode, trainer in trainers.items()
    }


def main() -> None:
    """Measure every method, print the table, write the record."""
    parser = argparse.ArgumentParser(description="training speed of padded, bucketed and packed batches")
    parser.add_argument("--methods", nargs="+", default=["eagle3", "mtp"])
    parser.add_argument("--rows", type=int, default=600, help="conversations")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="optimiser steps in a turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch uses")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    results = {}
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "target").mkdir()
        (Path(root) / "features").mkdir()
        ctx = Context(key="", out=Path(root) / "target", scratch=Path(root))
        target = open_target(load_target(ctx=ctx), kernel="plain")
        source = open_features(write_store(Path(root) / "features", target, asked.rows))
        for method in asked.methods:
            results[method] = measure(target, source, method, asked.batch_tokens, asked.turns, asked.steps)
            for mode, found in results[method].items():
                print(
                    f"{method:12} {mode:7} {found['tokens_per_second']:8.0f} tokens/s "
                    f"({found['times_as_fast_as_none']:.2f}x), {found['share_of_columns_used']:.0%} of columns used, "
                    f"{found['batches_in_an_epoch']} batches an epoch",
                    flush=True,
                )
    lengths = {"median": MEDIAN_TOKENS, "spread": SPREAD, "shortest": SHORTEST, "longest": LONGEST}
    numbers = {"rows": asked.rows, "batch_tokens": asked.batch_tokens, "lengths": lengths, "num_threads": asked.threads}
    file = write_record("packing", {**numbers, "results": results, "load_average": os.getloadavg()[0]})
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
