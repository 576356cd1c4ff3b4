"""`make gpu-record`: everything that only a GPU can show, one part after the other, in one record.

Each part is a command of its own with a limit of minutes; one that fails or does not end is recorded as such, and the
next begins. A part that no longer fits the budget is left out and named. The record holds every part's outcome, the
end of its output and the files it wrote beside it. Sized for 30 minutes on one H100.

    python -m benchmarks.gpu_record [--budget 30] [--parts tests memory] [--list]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from benchmarks.record import RESULTS, ROOT, write_record

TAIL = 4000
"""Characters of a part's output that are kept."""
FAILED = 2


@dataclass(frozen=True)
class Part:
    """A command that shows something of a GPU. command: after the interpreter; minutes: the most that it takes."""

    name: str
    shows: str
    command: tuple[str, ...]
    minutes: float


MEMORY_CASES = [f"{side}:{tokens}" for side in ("ours", "recompute") for tokens in (2048, 4096, 8192)]
PARTS: tuple[Part, ...] = (
    Part(
        "tests",
        "targets, drafters, training and decoding say on a GPU what they say on a CPU",
        ("-m", "pytest", "-m", "gpu", "-q", "-rs"),
        8,
    ),
    Part(
        "costs",
        "a pass of verification and of drafting by width, batch and context, with CUDA graphs and without",
        (
            "-m",
            "benchmarks.gpu_sweep",
            "--shape",
            "8b",
            "--batch-sizes",
            "1",
            "8",
            "32",
            "--kv-lengths",
            "1024",
            "16384",
        ),
        7,
    ),
    Part(
        "memory",
        "the peak of a training step in the shape of an 8B target, beside its estimate",
        ("-m", "benchmarks.training_memory", "--shape", "8b", "--device", "cuda", "--cases", *MEMORY_CASES),
        3,
    ),
    Part(
        "training-speed",
        "a training step beside that of speculators",
        ("-m", "benchmarks.training_speed", "--device", "cuda"),
        4,
    ),
    Part(
        "processes",
        "tokens a second of two training processes, where there are two GPUs",
        ("-m", "benchmarks.training_processes", "--device", "cuda", "--turns", "2", "--kills", "2"),
        4,
    ),
    Part(
        "quickstart",
        "the whole pipeline on a GPU: a drafter, its depth and a verdict",
        ("-m", "flows.cli", "run", "quickstart", "--direct", "--device", "cuda"),
        7,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a part went. state: "passed", "failed", "not ended" or "left out"; records: files that it wrote."""

    name: str
    shows: str
    command: str
    state: Literal["passed", "failed", "not ended", "left out"]
    seconds: float = 0.0
    output: str = ""
    records: tuple[str, ...] = ()


def run_part(part: Part, seconds_left: float) -> Outcome:
    """Run one part to its end or its limit."""
    command = [sys.executable, *part.command]
    known = ("python " + " ".join(part.command), part.minutes * 60)
    if seconds_left < known[1]:
        return Outcome(part.name, part.shows, known[0], "left out", output=f"{seconds_left:.0f} s were left")
    before, start = set(RESULTS.glob("*.json")), time.time()
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=known[1], check=False
        )
        state: Literal["passed", "failed", "not ended"] = "passed" if done.returncode == 0 else "failed"
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        state, output = "not ended", late.stdout or b""
    written = [file for file in RESULTS.glob("*.json") if file not in before or file.stat().st_mtime >= start]
    return Outcome(
        part.name,
        part.shows,
        known[0],
        state,
        round(time.time() - start, 1),
        output.decode(errors="replace")[-TAIL:],
        tuple(sorted(file.name for file in written)),
    )


def run_all(parts: Sequence[Part], budget: float) -> list[Outcome]:
    """Run the parts within so many seconds."""
    end, outcomes = time.monotonic() + budget, []
    for part in parts:
        print(f"== {part.name}: {part.shows}", flush=True)
        outcomes.append(run_part(part, end - time.monotonic()))
        print(f"{outcomes[-1].state} in {outcomes[-1].seconds:.0f} s", flush=True)
    return outcomes


def driver() -> str:
    """What nvidia-smi says of the GPUs, their driver and their power limits."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return "no nvidia-smi"
    asked = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
    done = subprocess.run([found, asked, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> int:
    """Run what was asked for, print a table, write the record; 1 where a part failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="everything that only a GPU can show")
    parser.add_argument("--budget", type=float, default=30, help="minutes for all parts")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="these alone")
    parser.add_argument("--list", action="store_true", help="say what would run")
    asked = parser.parse_args()
    parts = [part for part in PARTS if not asked.parts or part.name in asked.parts]
    if asked.list:
        for part in parts:
            print(f"{part.name:<15}{part.minutes:>3.0f} min  {part.shows}: python {' '.join(part.command)}")
        return 0
    if not torch.cuda.is_available():
        print("gpu-record: there is no CUDA device here; --list says what would run", file=sys.stderr)
        return FAILED
    outcomes = run_all(parts, asked.budget * 60)
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": driver().splitlines()}
    file: Path = write_record("gpu", {**facts, "parts": [asdict(outcome) for outcome in outcomes]}, device="cuda")
    for outcome in outcomes:
        print(f"{outcome.name:<15}{outcome.state:<10}{outcome.seconds:>7.0f} s  {' '.join(outcome.records)}")
    print(file.relative_to(ROOT))
    return 1 if any(outcome.state in ("failed", "not ended") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
