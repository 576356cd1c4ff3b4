"""What long contexts cost an EAGLE-3 drafter with a window and without one, in drafting and in training.

Drafting: after texts of several lengths, rounds of a few committed positions and a chain of draft tokens; the time of a
round, that of taking the prompt in, and the bytes of the drafter's cache. Training: one optimiser step on one row of
many tokens, in a process of its own; its time, and its peak memory beyond weights and batch. All weights and hidden
states are random, rotary positions are scaled by YaRN beyond 4096: acceptance is not measured here, since it is a
matter of training (the report's table of acceptance by context length has it).

    python -m benchmarks.long_context [--lengths 1024 4096 16384 32768] [--tokens 8192 32768] [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.eagle3_sample import Sample, new_drafter
from benchmarks.record import ROOT, write_record
from benchmarks.training_speed import SHAPES, Shape, random_text
from benchmarks.training_worker import peak, resident
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.training.optimizer import Optimizer

DRAFTER = replace(SHAPES["medium"], prompt_tokens=16)
TRAINED = replace(DRAFTER, hidden_size=256, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2)
TRAINED = replace(TRAINED, vocab_size=4096, draft_vocab_size=1024, ttt_steps=3)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
COMMITTED, DEPTH = 3, 5  # positions of a round, and its draft tokens
WINDOW = 1024


def names(window: int) -> str:
    """An arm's name in tables."""
    return f"window {window}" if window else "full"


def random_sample(shape: Shape, window: int) -> Sample:
    """A drafter with such a window, 0 for none, and random states of a target."""
    target, draft_ids, batch = random_text(shape)
    settings = {"ttt_steps": shape.ttt_steps, "window": window, "rope_scaling": YARN}
    return Sample(new_drafter(target, draft_ids, batch.taps[0], settings), batch)


def draft_rounds(length: int, rounds: int, windows: Sequence[int]) -> list[dict[str, Any]]:
    """Rounds after a text of `length` tokens, the arms in turns; one row an arm."""
    shape = replace(DRAFTER, num_tokens=length + (rounds + 1) * COMMITTED + 1)
    arms = {}
    for window in windows:
        draft, batch = random_sample(shape, window)
        draft.eval().requires_grad_(False).prepare_decoding()
        arms[window] = (draft, draft.new_state(shape.num_tokens))
    times: dict[int, list[float]] = {window: [] for window in windows}
    first, generator, start = {}, torch.Generator(), 0
    for turn in range(rounds + 2):  # the prompt, one round to warm up, then those that count
        size = COMMITTED if turn else length
        new = CommittedPositions(
            batch.ids[0, start + 1 : start + size + 1],
            batch.taps[0, start : start + size],
            batch.last[0, start : start + size],
        )
        start += size
        for window in sorted(arms, reverse=bool(turn % 2)):
            draft, state = arms[window]
            began = time.perf_counter()
            draft.propose(state, new, DEPTH, Sampling(), generator)
            seconds = time.perf_counter() - began
            if turn > 1:
                times[window].append(seconds * 1e3)
            elif not turn:
                first[window] = seconds * 1e3
    rows = []
    for window, (_, state) in arms.items():
        low, median, high = statistics.quantiles(times[window], n=4)
        ratios = [mine / full for mine, full in zip(times[window], times[windows[0]], strict=True)]
        rows.append(
            {
                "attention": names(window),
                "context": length,
                "round_ms": round(median, 4),
                "round_ms_quartiles": [round(low, 4), round(high, 4)],
                "round_over_full": round(statistics.median(ratios), 4),
                "prompt_ms": round(first[window], 1),
                "cache_bytes": sum(cache.rows.nbytes for cache in state.caches),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def train(tokens: int, window: int, steps: int) -> dict[str, Any]:
    """Optimiser steps on one row of `tokens` tokens, in this process: the median time of a step, and peak memory."""
    draft, batch = random_sample(replace(TRAINED, num_tokens=tokens), window)
    short = batch._replace(**{name: getattr(batch, name)[:, :256] for name in ("ids", "mask", "taps", "last")})
    short = short._replace(lengths=torch.tensor([256]))
    optimizer = Optimizer(draft.train(), "adamw", weight_decay=0.01, muon_lr_scale=1.0)
    before, seconds = resident("cpu"), []
    for some in (short, *[batch] * steps):
        began = time.perf_counter()
        optimizer.update(draft.losses(some).loss, 1e-4, clip_norm=1.0)
        seconds.append(time.perf_counter() - began)
    step = statistics.median(seconds[1:])
    return {
        "attention": names(window),
        "tokens": tokens,
        "step_seconds": round(step, 3),
        "steps": steps,
        "tokens_per_second": round(tokens / step),
        "peak_bytes": peak("cpu") - before,
    }


def train_apart(tokens: int, window: int, steps: int) -> dict[str, Any]:
    """`train` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.long_context", "--train", str(tokens), str(window), str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # the kernel ends a process that takes too much memory
        last = done.stderr.strip().splitlines()[-1:]
        row = {"attention": names(window), "tokens": tokens, "failed": done.returncode, "why": last}
    else:
        row = json.loads(done.stdout)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Measure, print the tables, write the record."""
    parser = argparse.ArgumentParser(description="drafting and training at long contexts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768], help="tokens before")
    parser.add_argument("--rounds", type=int, default=200, help="rounds after each")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="tokens of a training row")
    parser.add_argument("--small", action="store_true", help="short texts, no record: to try it")
    parser.add_argument("--train", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    if options.train:
        print(json.dumps(train(*options.train)))
        return
    if options.small:
        options.lengths, options.rounds, options.tokens = [1024, 4096], 20, [1024, 2048]
    drafting = [row for length in options.lengths for row in draft_rounds(length, options.rounds, (0, WINDOW))]
    training = [
        train_apart(tokens, window, 3 if tokens <= 8192 else 1) for tokens in options.tokens for window in (0, WINDOW)
    ]
    numbers = {
        "num_threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "drafting": {"shape": asdict(DRAFTER), "committed": COMMITTED, "depth": DEPTH, "rows": drafting},
        "training": {"shape": asdict(TRAINED), "rows": training},
    }
    if not options.small:
        print(f"written: {write_record('long-context', numbers).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
