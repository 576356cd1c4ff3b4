"""How much memory does a training step of EAGLE-3 hold at its peak, and does the estimate made before it say so?

Every case runs in a process of its own, one after the other, under bfloat16 autocast with AdamW: ours with and without
`recompute`, ours at an earlier commit, and speculators'. All tokens are an answer's. Peak is the process's resident set
from the first step on, or the GPU's memory. The seconds of one step are no timing. `--steps` takes more of ours, whose
median is one, and times a step's attention alone, beside torch's own over the same causal part: the difference is what
a fused kernel could save of the step.

    python -m benchmarks.training_memory [--shape 8b] [--cases ours:2048 theirs:2048 recompute:4096 before:1024]
        [--steps 6] [--float32-products]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import ROOT, write_record
from benchmarks.speculators_environment import VERSION, python

SHAPES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    | {"head_dim": 64, "vocab_size": 16384, "draft_vocab_size": 4096, "ttt_steps": 7},
    "1b": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    | {"head_dim": 64, "vocab_size": 32768, "draft_vocab_size": 8192, "ttt_steps": 7},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "vocab_size": 128256, "draft_vocab_size": 32000, "ttt_steps": 7},
}
BEFORE = "9784b18"  # the last commit whose masks and logits were whole
SPARE = 1 << 31  # bytes that stay free for others
WORKER = "training_memory_worker"
SIDES = ("ours", "recompute", "before", "theirs")
USUAL = [(side, tokens) for side in SIDES for tokens in (512, 1024, 2048)]


def side_and_tokens(text: str) -> tuple[str, int]:
    """A case as it is written on the command line, "ours:2048"."""
    side, _, tokens = text.partition(":")
    if side not in SIDES or not tokens.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no SIDE:TOKENS, with a side of {', '.join(SIDES)}")
    return side, int(tokens)


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The repository at an earlier commit, with this benchmark's worker in it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", str(tree), commit], cwd=ROOT, check=True)
        try:
            shutil.copy(ROOT / "benchmarks" / f"{WORKER}.py", tree / "benchmarks")
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def run(command: list[str], case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One case in its own process; {"failed": why} where it needs more memory than there is."""
    if case["device"] == "cpu":
        case["limit"] = psutil.virtual_memory().available - SPARE
    done = subprocess.run(
        [*command, json.dumps(case)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["it was killed"])[-1][:200], "limit": case.get("limit")}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(side: str, case: dict[str, Any]) -> dict[str, Any]:
    """One case of one side."""
    own = [sys.executable, "-m", f"benchmarks.{WORKER}"]
    if side == "theirs":
        return run([str(python()), str(ROOT / "benchmarks" / "speculators_memory_worker.py")], case, ROOT)
    if side == "before":
        with checkout(BEFORE) as tree:
            return run(own, case, tree)
    return run(own, {**case, "recompute": side == "recompute", "estimate": True}, ROOT)


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description="peak memory of an EAGLE-3 training step")
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument(
        "--cases", nargs="+", type=side_and_tokens, default=USUAL, metavar="SIDE:TOKENS", help=f"of {SIDES}"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch uses")
    parser.add_argument("--steps", type=int, default=1, help="optimiser steps of ours; above 1: timings")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="on cuda ours alone can be measured")
    parser.add_argument(
        "--float32-products",
        action="store_true",
        help="of bfloat16, where the processor has none: ours and before alone",
    )
    asked = parser.parse_args()
    if asked.float32_products:
        asked.cases = [case for case in asked.cases if case[0] != "theirs"]
    if asked.device == "cuda":
        asked.cases = [case for case in asked.cases if case[0] in ("ours", "recompute")]
    common = {"shape": SHAPES[asked.shape], "threads": asked.threads, "optimizer": asked.optimizer, "recompute": False}
    common |= {"device": asked.device, "float32_products": asked.float32_products, "steps": asked.steps}
    name = f"training-memory-{asked.shape}" + ("" if asked.device == "cpu" else f"-{asked.device}")
    rows: list[dict[str, Any]] = []
    numbers = {"speculators": VERSION, "before": BEFORE, "shape": common["shape"], "optimizer": asked.optimizer}
    numbers["float32_products"] = asked.float32_products
    for side, tokens in asked.cases:
        answer = measure(side, {**common, "tokens": tokens})
        row = {"side": side, "tokens": tokens, **answer}
        if estimate := answer.get("estimated_bytes"):
            row["estimate_over_peak"] = estimate / answer["peak_bytes"]
        rows.append(row)
        text = answer.get("failed") or f"peak {answer['peak_bytes'] / 1e9:6.2f} GB, {answer['step_seconds']:6.2f} s"
        if alone := answer.get("attention"):
            text += f", attention {alone['ours']['seconds']:.3f} s (torch's own {alone['fused']['seconds']:.3f})"
        ratio = row.get("estimate_over_peak")
        print(f"{side:10} {tokens:6} tokens  {text}{f'  estimate {ratio:.2f} of it' if ratio else ''}", flush=True)
        # After every case: one of hours that is ended costs no other.
        file = write_record(name, {**numbers, "results": rows}, device=asked.device)
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
