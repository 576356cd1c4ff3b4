"""Run a step in a process that is killed with SIGKILL while it works, so that what it leaves can be gone on from."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.contract import Context

Step = Callable[[Context], object]


def context(out: Path, send: Callable[[Any], None] | None = None) -> Context:
    """A context as the engine makes it: files under `out`, checkpoints beside it."""
    scratch = out.with_name(f"{out.name}.scratch")
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=out, scratch=scratch, num_threads=1, send=send)


def run_killed(step: Step, out: Path, after: int) -> bool:
    """Run the step in a forked process that dies at its `after`-th progress event; whether it got that far."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(step, out, after))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def _run(step: Step, out: Path, after: int) -> None:
    seen = 0

    def send(event: Any) -> None:
        nonlocal seen
        seen += event["event"] == "progress"
        if seen == after:
            os.kill(os.getpid(), signal.SIGKILL)

    step(context(out, send))


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything a finished step has left."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
