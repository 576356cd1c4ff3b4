"""How fast does the built-in target decode plainly and verify, by linear kernel, arithmetic and number of threads?

Needs no run: only the weights in the repository. Every engine decodes the same text in turn, round after round, so that
whatever else the machine does meets all of them alike; the median round is the number. One row a pass is plain
decoding, more rows are what verifying a draft of that many tokens less one costs.

    python -m benchmarks.threads_and_kernels [--rounds 7] [--tokens 24]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.record import ROOT, write_record
from components.bench.clock import quiet_interpreter, threads
from components.machine import describe_machine
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

MODEL = ROOT / "components" / "targets" / "builtin"
CONTEXT = 128  # tokens in the cache before time counts
ROWS = (1, 2, 4, 8)
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
KERNELS = ("plain", "prepacked", "auto", "transformers")


def pass_ms(target: AbstractTarget, ids: torch.Tensor, rows: int, passes: int) -> float:
    """Mean milliseconds of a pass of `rows` rows at CONTEXT tokens and what the passes themselves add."""
    cache = target.new_cache(1, CONTEXT + rows * passes)
    target.forward(ids[:, :CONTEXT], cache, logits="none")
    block = ids[:, :rows]
    start = time.perf_counter()
    for _ in range(passes):
        target.forward(block, cache)
        cache.truncate(cache.lengths - rows + 1)
    return (time.perf_counter() - start) / passes * 1e3


def main() -> None:
    """Time every engine, print the table, write the record."""
    parser = argparse.ArgumentParser(description="plain decoding and verification by kernel, dtype and threads")
    parser.add_argument("--rounds", type=int, default=7, help="times every engine takes its turn")
    parser.add_argument("--tokens", type=int, default=24, help="passes timed in one turn")
    asked = parser.parse_args()
    if not list(Path(MODEL).glob("*.safetensors")):
        raise SystemExit(f"threads_and_kernels: no weights in {MODEL.relative_to(ROOT)}")
    counts = sorted({1, describe_machine().num_cores})
    engines: list[tuple[dict[str, Any], AbstractTarget]] = []
    for count, dtype, kernel in itertools.product(counts, DTYPES, KERNELS):
        with threads(count):  # "auto" picks its kernels at this count
            opened = open_target(MODEL, dtype=dtype, kernel=kernel)
        engines.append(({"num_threads": count, "dtype": dtype, "asked": kernel, "kernel": opened.kernel}, opened))
    vocab = engines[0][1].shape.vocab_size
    ids = torch.randint(1, vocab, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    times: dict[tuple[int, int], list[float]] = {}
    with quiet_interpreter():
        for turn in range(asked.rounds + 1):  # the first turn warms up
            for number, (facts, opened) in enumerate(engines):
                with threads(facts["num_threads"]):
                    for rows in ROWS:
                        spent = pass_ms(opened, ids, rows, asked.tokens)
                        if turn:
                            times.setdefault((number, rows), []).append(spent)
    results = []
    for number, (facts, _) in enumerate(engines):
        medians = {rows: statistics.median(times[number, rows]) for rows in ROWS}
        results.append({**facts, "pass_ms": {str(rows): round(ms, 4) for rows, ms in medians.items()}})
        shown = "  ".join(f"{rows} rows {ms:7.2f} ms" for rows, ms in medians.items())
        print(f"{facts['num_threads']} threads  {facts['dtype']:8}  {facts['asked']:12}  {shown}")
    load = os.getloadavg()[0]
    numbers = {"context_tokens": CONTEXT, "rounds": asked.rounds, "passes": asked.tokens, "load_average": load}
    file = write_record("threads-and-kernels", {**numbers, "results": results})
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
