"""Training in two processes beside training in one: tokens a second, what they learn, and ten deaths.

Random conversations of ragged lengths in the built-in target's shape (packing.write_store), EAGLE-3, float32. One
process with one thread and two processes with one thread each take turns; the time is that between the first and the
last optimiser step, so starting processes does not count. Then a process is killed at a random moment of ten runs, and
the drafter and its metrics are compared with those of a run that nothing disturbed.

    python -m benchmarks.training_processes [--method eagle3] [--turns 3] [--steps 16] [--kills 10]     (0: without)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.packing import write_store
from benchmarks.record import ROOT, write_record
from components.contract import Context, Features, Target
from components.drafts import train_draft
from components.targets import load_target
from components.targets.load import open_target

VALIDATION = 8
Listener = Callable[[Mapping[str, Any]], None]


def with_validation(features: Features) -> Features:
    """The same conversations, the last of them for evaluation."""
    file = features.path / "manifest.json"
    manifest = json.loads(file.read_text())
    for row in manifest["rows"][-VALIDATION:]:
        row["split"] = "validation"
    file.write_text(json.dumps(manifest))
    return features


class Trainer:
    """Trains the same drafter again and again, in folders of their own."""

    def __init__(self, root: Path, method: str, steps: int, batch_tokens: int, device: str) -> None:
        for name in ("target", "features"):
            (root / name).mkdir()
        self.root = root
        self.target: Target = load_target(ctx=Context(key="", out=root / "target", scratch=root))
        self.features = with_validation(write_store(root / "features", open_target(self.target, kernel="plain"), 600))
        self.settings: dict[str, Any] = {"method": method, "num_steps": steps, "batch_tokens": batch_tokens}
        self.settings |= {"precision": "float32", "eval_every": steps, "checkpoint_minutes": 0.05}
        self.runs, self.device = 0, device

    def run(self, processes: int, listen: Listener) -> Path:
        """Train with one thread a process; returns the drafter's folder."""
        self.runs += 1
        folder = self.root / f"run-{self.runs}"
        ctx = Context(
            key="",
            out=folder / "out",
            scratch=folder / "scratch",
            device=self.device,
            num_threads=processes,
            send=listen,
        )
        for path in (ctx.out, ctx.scratch):
            path.mkdir(parents=True)
        train_draft(self.target, self.features, **self.settings, processes=processes, ctx=ctx)
        return ctx.out

    def timed(self, processes: int) -> tuple[float, Path]:
        """Seconds of an optimiser step after the first, and the drafter's folder."""
        at: list[float] = []

        def listen(event: Mapping[str, Any]) -> None:
            if event["event"] == "metrics" and "loss" in event:
                at.append(float(event["time"]))

        out = self.run(processes, listen)
        return (at[-1] - at[0]) / (len(at) - 1), out

    def killed(self, generator: random.Random) -> tuple[int, Path]:
        """Kill one of two processes at a random moment; the optimiser step after which it died, and the folder."""
        moment = generator.randrange(1, self.settings["num_steps"])
        killed: list[int] = []

        def listen(event: Mapping[str, Any]) -> None:
            if event["event"] == "progress" and event["done"] == moment and not killed:
                time.sleep(generator.random() * 0.5)
                victims = [p for p in psutil.Process().children(recursive=True) if "LOCAL_RANK" in p.environ()]
                killed.append(generator.choice(victims).pid)
                os.kill(killed[0], signal.SIGKILL)

        out = self.run(2, listen)
        assert killed, "nothing was killed"
        return moment, out


def same(left: Path, right: Path) -> bool:
    """Whether two runs left the same weights, record and metrics."""
    names = ("model.safetensors", "draft.json", "metrics.jsonl")
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def measured(out: Path) -> dict[str, list[float]]:
    """Losses and held-out acceptance lengths of a run."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows if name in row] for name in ("loss", "held_out_al")}


def main() -> None:
    """Measure, print, write the record."""
    parser = argparse.ArgumentParser(description="training in two processes beside training in one")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(Path(root), asked.method, asked.steps, asked.batch_tokens, asked.device)
        results = {"training-processes": timing(trainer, asked.turns)} if asked.turns else {}
        if asked.kills:
            results["training-deaths"] = deaths(trainer, asked.kills)
    for name, numbers in results.items():
        record = name if asked.device == "cpu" else f"{name}-{asked.device}"
        print(write_record(record, {"settings": vars(asked), **numbers}, device=asked.device).relative_to(ROOT))


def timing(trainer: Trainer, turns: int) -> dict[str, Any]:
    """One process and two in turn: seconds of a step, their ratio, and what both learn."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    learned: dict[int, dict[str, list[float]]] = {}
    for turn in range(turns):
        for processes in sorted(seconds, reverse=bool(turn % 2)):
            step, out = trainer.timed(processes)
            seconds[processes].append(step)
            learned[processes] = measured(out)
            print(f"{processes} processes: {step:.3f} s a step", flush=True)
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    worst = max(abs(a - b) / a for a, b in zip(learned[1]["loss"], learned[2]["loss"], strict=True))
    print(f"two processes are {statistics.median(ratios):.2f} times as fast; losses differ by {worst:.1e} at most")
    return {
        "seconds_a_step": {str(processes): values for processes, values in seconds.items()},
        "times_as_fast": statistics.median(ratios),
        "all_times_as_fast": ratios,
        "alone": learned[1],
        "together": learned[2],
        "largest_relative_difference_of_losses": worst,
        "load_average": os.getloadavg()[0],
    }


def deaths(trainer: Trainer, number: int) -> dict[str, Any]:
    """So many runs of two processes, one of which is killed, beside a run that nothing disturbs."""
    _, undisturbed = trainer.timed(2)
    generator, rows = random.Random(0), []
    for _ in range(number):
        moment, out = trainer.killed(generator)
        rows.append({"after_step": moment, "same_bits": same(out, undisturbed)})
        print(f"killed after step {moment}: same bits {rows[-1]['same_bits']}", flush=True)
    return {"deaths": rows}


if __name__ == "__main__":
    main()
