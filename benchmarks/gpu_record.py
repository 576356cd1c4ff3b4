"""`make gpu-record`: everything that only a GPU can show, one part after the other, in one record.

Each part is a command of its own with a limit of minutes; the limits sum to less than half an hour on one H100, and the
parts worth most come first. One that fails or does not end is recorded as such, with all that it started ended, and the
next begins. One that the machine has not what it takes for is skipped, and one that no longer fits the budget is left
out; both are named. The record is written after every part: each part's outcome, the end of its output and the files
that it wrote beside it. What has to be made once (the environment of speculators) is made before the minutes begin.

    python -m benchmarks.gpu_record [--budget 30] [--parts tests memory] [--list]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from benchmarks import speculators_environment
from benchmarks.record import RESULTS, ROOT, write_record

TAIL = 4000
"""Bytes of a part's output that are kept."""
BUDGET = 30.0
"""Minutes for all parts, this program's own start and records counted."""
FAILED = 2


def nothing() -> str:
    """What a part lacks that any GPU is enough for."""
    return ""


def second_gpu() -> str:
    """What a part of two GPUs lacks here."""
    number = torch.cuda.device_count()
    return "" if number >= 2 else f"needs two GPUs, and this machine has {number}"


def speculators() -> str:
    """What a part beside speculators lacks here: their environment, where it is not there and cannot be made."""
    try:
        speculators_environment.python()
    except SystemExit as failed:
        return str(failed)
    return ""


@dataclass(frozen=True)
class Part:
    """A command that shows something of a GPU. command: after the interpreter; minutes: the most that it takes.

    lacks: says in a line why this machine cannot run it, "" where it can.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    minutes: float
    lacks: Callable[[], str] = nothing


def module(name: str, arguments: str) -> tuple[str, ...]:
    """The command of a module."""
    return ("-m", name, *arguments.split())


PARTS = (
    Part(
        "tests",
        "targets, drafters, training and decoding say on a GPU what they say on a CPU",
        module("benchmarks.gpu_tests", ""),
        6,
    ),
    Part(
        "memory",
        "peak memory and time of a training step of EAGLE-3 in Llama-3.1-8B's shape, its attention also alone",
        module(
            "benchmarks.training_memory",
            "--shape 8b --device cuda --steps 6 --cases ours:2048 ours:8192 recompute:2048 recompute:8192 ours:4096",
        ),
        4,
    ),
    Part(
        "costs",
        "a pass of verification and of drafting by width, batch and context, with CUDA graphs and without",
        module(
            "benchmarks.gpu_sweep",
            "--shape 8b --batch-sizes 1 8 32 --kv-lengths 1024 16384 --seconds 60 --processes 2",
        ),
        8,
    ),
    Part(
        "quickstart",
        "the whole pipeline on a GPU: a drafter, its depth and a verdict",
        module("flows.cli", "run quickstart --direct --device cuda"),
        6,
    ),
    Part(
        "training-speed",
        "a training step of EAGLE-3 in Llama-3.1-8B's shape beside that of speculators",
        module(
            "benchmarks.training_speed",
            # Their fused losses did not compile with torch 2.11 on an H100.
            "--device cuda --methods eagle3 --shapes 8b --precision bfloat16 --turns 3 --their-losses eager",
        ),
        3,
        speculators,
    ),
    Part(
        "processes",
        "tokens a second of two training processes, and the death of one",
        module("benchmarks.training_processes", "--device cuda --turns 1 --kills 1"),
        2,
        second_gpu,
    ),
)
"""In the order of their worth."""


State = Literal["passed", "failed", "not ended", "skipped", "left out"]


@dataclass(frozen=True)
class Outcome:
    """How a part went. output: its end, or why it was not run; records: files that it wrote."""

    name: str
    shows: str
    command: str
    state: State
    seconds: float = 0.0
    output: str = ""
    records: tuple[str, ...] = ()


def run_part(part: Part, lacking: str, seconds_left: float, folder: Path) -> Outcome:
    """Run one part to its end or its limit, where nothing is lacking and its limit is left."""
    known = (part.name, part.shows, "python " + " ".join(part.command))
    if lacking:
        return Outcome(*known, "skipped", output=lacking)
    if seconds_left < part.minutes * 60:
        return Outcome(
            *known, "left out", output=f"its limit is {part.minutes:g} min, and {seconds_left:.0f} s were left"
        )
    before, start = set(folder.glob("*.json")), time.time()
    # The folder takes gigabytes of a part that is ended with it; a file holds the output also where a process stays.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            state: State = "passed" if process.wait(part.minutes * 60) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "not ended"
        finally:
            if process.poll() is None:
                end_all_of(process)
        seconds = round(time.time() - start, 1)
        output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL))
        text = output.read().decode(errors="replace")
    written = [file for file in folder.glob("*.json") if file not in before or file.stat().st_mtime >= start]
    return Outcome(*known, state, seconds, text, tuple(sorted(file.name for file in written)))


def end_all_of(process: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started: what stays would hold memory of the GPU and time of the next part."""
    started = psutil.Process(process.pid).children(recursive=True)  # some have groups of their own
    os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def record_parts(parts: Sequence[Part], minutes: float, device: str, folder: Path) -> int:
    """Run the parts within so many minutes, write the record after each and print a table.

    Returns 1 where a part failed or did not end.
    """
    lacking = [part.lacks() for part in parts]  # what is made for it takes none of the minutes
    end, outcomes = time.monotonic() + minutes * 60, list[Outcome]()
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": driver().splitlines()}
    for number, (part, lacks) in enumerate(zip(parts, lacking, strict=True), start=1):
        print(f"== {part.name}: {part.shows}", flush=True)
        outcome = run_part(part, lacks, end - time.monotonic(), folder)
        outcomes.append(outcome)
        why = f": {outcome.output}" if outcome.state in ("skipped", "left out") else f" in {outcome.seconds:.0f} s"
        print(f"{outcome.state}{why}", flush=True)
        done = {"parts": [asdict(one) for one in outcomes], "remaining": [later.name for later in parts[number:]]}
        file = write_record("gpu", {**facts, **done}, device=device, folder=folder)
    for outcome in outcomes:
        print(f"{outcome.name:<15}{outcome.state:<10}{outcome.seconds:>7.0f} s  {' '.join(outcome.records)}")
    print(f"written: {file}")
    return 1 if any(outcome.state in ("failed", "not ended") for outcome in outcomes) else 0


def driver() -> str:
    """What nvidia-smi says of the GPUs, their driver and their power limits."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return "no nvidia-smi"
    asked = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
    done = subprocess.run([found, asked, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main(every: Sequence[Part] = PARTS, *, device: str = "cuda", folder: Path = RESULTS) -> int:
    """Run what was asked for; 1 where a part failed or did not end, 2 without a GPU."""
    parser = argparse.ArgumentParser(description="everything that only a GPU can show")
    parser.add_argument("--budget", type=float, default=BUDGET, help="minutes for all parts")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in every], help="these alone")
    parser.add_argument("--list", action="store_true", help="say what would run")
    asked = parser.parse_args()
    parts = [part for part in every if not asked.parts or part.name in asked.parts]
    if asked.list:
        for part in parts:
            print(f"{part.name:<15}{part.minutes:>3.0f} min  {part.shows}: python {' '.join(part.command)}")
        return 0
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu-record: there is no CUDA device here; --list says what would run", file=sys.stderr)
        return FAILED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no part outlives it
    return record_parts(parts, asked.budget, device, folder)


if __name__ == "__main__":
    sys.exit(main())
