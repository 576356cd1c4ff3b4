"""How fast is a training step of ours, and how much memory does it take, against speculators' on the same shapes?

EAGLE-3, DFlash and DSpark. Both sides get one file: the same weights, the same text, the same number of steps; each
does forward, backward, clipping and AdamW in a process of its own, in float32 or under bfloat16 autocast, and they take
turns, so that whatever else the machine does meets both alike. The median turn is the number. Memory is the process's
peak beyond what it held before the first step (weights and batch loaded): gradients, moments and activations. EAGLE-3:
theirs computes every column, ours those that decoding can reach; theirs keeps the LM head frozen, ours trains it, and
stands beside with the head frozen. Blocks: both train one from each of `anchors` random positions of the answer, with
the method's usual width and loss.

    python -m benchmarks.training_speed [--methods eagle3 dflash dspark] [--shapes builtin medium] [--turns 7]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.block_sample import draw_weights, write_cases
from benchmarks.eagle3_sample import FrozenParts, Sample, new_drafter, write_sample
from benchmarks.record import ROOT, write_record
from benchmarks.speculators_environment import VERSION, WORKER, python
from components.drafts.interface import Batch
from components.drafts.storage.files import build_draft

BLOCK_WORKER = Path(__file__).with_name("dflash_worker.py")
METHODS = ("eagle3", "dflash", "dspark")


@dataclass(frozen=True)
class Shape:
    """A drafter and a text. prompt_tokens: how many of num_tokens come before the answer."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_tokens: int
    prompt_tokens: int
    ttt_steps: int
    anchors: int


SHAPES = {
    "builtin": Shape(192, 576, 6, 2, 32, 4096, 1024, 512, 128, 7, 256),
    "medium": Shape(512, 1536, 8, 4, 64, 16384, 4096, 512, 128, 7, 256),
    "1b": Shape(2048, 8192, 32, 8, 64, 128256, 32000, 2048, 512, 7, 512),
    "8b": Shape(4096, 14336, 32, 8, 128, 128256, 32000, 2048, 512, 7, 512),
}
"""builtin: the built-in target's drafter; medium: a CPU takes seconds a step; 1b and 8b: those of
Llama 3's models, for a GPU."""


class Side:
    """One trainer in its own process."""

    def __init__(self, command: list[str], file: Path, device: str, threads: int) -> None:
        # A waiting side must not spin: the other one is being timed.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
        self._process = subprocess.Popen(
            [*command, str(file), device, str(threads)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def train(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do the optimiser steps of a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": "train", **request}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("training_speed: a side ended early, its own message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def random_text(shape: Shape) -> tuple[Any, torch.Tensor, Batch]:
    """The frozen parts of a target, draft ids, and random states whose residual stream grows from tap to tap."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    hidden, length = shape.hidden_size, shape.num_tokens
    draft_ids = torch.arange(0, shape.vocab_size, shape.vocab_size // shape.draft_vocab_size)[: shape.draft_vocab_size]
    facts = SimpleNamespace(**asdict(shape), rms_norm_eps=1e-6, rope_theta=10000.0)
    head = normal(shape.vocab_size, hidden) * hidden**-0.5
    target = FrozenParts(facts, normal(shape.vocab_size, hidden), torch.ones(hidden), head)
    taps = normal(1, length, 3 * hidden) * torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(hidden)
    ids = torch.randint(0, shape.vocab_size, (1, length), generator=generator)
    mask = torch.arange(length)[None] >= shape.prompt_tokens
    return target, draft_ids, Batch(ids, mask, taps, 4 * normal(1, length, hidden), torch.tensor([length]))


def write_random_sample(file: Path, method: str, shape: Shape) -> None:
    """Write a drafter of a shape and what it is trained on."""
    target, draft_ids, batch = random_text(shape)
    if method == "eagle3":
        draft = new_drafter(target, draft_ids, batch.taps[0], {"ttt_steps": shape.ttt_steps})
        write_sample(file, Sample(draft, batch), batch.mask)
        return
    block = build_draft(method, target, {"max_anchors": shape.anchors}, draft_ids)
    draw_weights(block)
    text = {"ids": batch.ids[0], "mask": batch.mask[0], "taps": batch.taps[0], "last": batch.last[0]}
    write_cases(file, target, {method: block}, text, target.head)


def measure(
    method: str, shape: Shape, device: str, threads: int, turns: int, request: dict[str, Any]
) -> dict[str, Any]:
    """Both sides in turn on one shape; request: what each side is asked for in a turn."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sample.safetensors"
        write_random_sample(file, method, shape)
        own = [sys.executable, "-m", "benchmarks.training_worker"]
        if method == "eagle3":
            commands = {
                "ours": [*own, "trained-head"],
                "ours, LM head frozen": [*own, "frozen-head"],
                "theirs": [str(python()), str(WORKER)],
            }
        else:
            commands = {"ours": [*own, "block"], "theirs": [str(python()), str(BLOCK_WORKER), "train"]}
        sides = {name: Side(command, file, device, threads) for name, command in commands.items()}
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for turn in range(turns + 1):  # the first turn warms up
            # Whoever goes first changes from turn to turn.
            for name in sorted(sides, reverse=bool(turn % 2)):
                answer = sides[name].train(request)
                if turn:
                    answers[name].append(answer)
        for side in sides.values():
            side.close()
    found: dict[str, Any] = {"shape": asdict(shape)}
    for name, given in answers.items():
        seconds = statistics.median(answer["seconds"] for answer in given) / request["steps"]
        found[name] = {
            "step_seconds": seconds,
            "tokens_per_second": shape.num_tokens / seconds,
            "peak_bytes": given[-1]["peak_bytes"],
            "trained_parameters": given[-1]["trained_parameters"],
        }
    for name, given in answers.items():
        pairs = zip(answers["theirs"], given, strict=True)
        found[name]["times_as_fast"] = statistics.median(their["seconds"] / our["seconds"] for their, our in pairs)
        found[name]["memory_ratio"] = found[name]["peak_bytes"] / found["theirs"]["peak_bytes"]
    return found


def main() -> None:
    """Measure every shape, print the table, write the record."""
    parser = argparse.ArgumentParser(description="Training steps against speculators'")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["builtin", "medium"])
    parser.add_argument("--turns", type=int, default=7, help="times either side takes its turn")
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps in a turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch uses")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"), help="bfloat16: autocast")
    parser.add_argument("--their-losses", choices=("eager", "fused"), help="default: fused on a GPU, eager elsewhere")
    asked = parser.parse_args()
    kernels = asked.their_losses or ("fused" if asked.device.startswith("cuda") else "eager")
    autocast = "" if asked.precision == "float32" else asked.precision
    request = {"steps": asked.steps, "autocast": autocast, "kernels": kernels}
    rows = {}
    for method, size in itertools.product(asked.methods, asked.shapes):
        name = size if method == "eagle3" else f"{method} {size}"
        row = measure(method, SHAPES[size], asked.device, asked.threads, asked.turns, request)
        rows[name] = row
        for side in (side for side in row if side != "shape"):
            found = row[side]
            print(
                f"{name:14} {side:20} {found['tokens_per_second']:8.0f} tokens/s {found['step_seconds'] * 1e3:8.1f} ms "
                f"{found['peak_bytes'] / 2**20:6.0f} MiB {found['trained_parameters']:11,} parameters trained  "
                f"{found['times_as_fast']:.2f}x as fast, {found['memory_ratio']:.2f}x the memory"
            )
    numbers = {
        "speculators": VERSION,
        "num_threads": asked.threads,
        "steps_in_a_turn": asked.steps,
        "precision": asked.precision,
        "their_losses": kernels,
        "results": rows,
    }
    device = asked.device.split(":")[0]
    name = "training-speed" if device == "cpu" else f"training-speed-{device}"
    file = write_record(name, {**numbers, "load_average": os.getloadavg()[0]}, device=device)
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
