"""A shard at which one of the processes that work on it together fails: a file of its own, light to load in them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from torch import distributed

from components.contract import ReportProgress, UserError


@dataclass(frozen=True)
class Fault:
    """A shard whose second process meets something."""

    file: Path
    kind: str
    device: str = "cpu"
    num_threads: int = 1


def meet(shard: Fault, report_progress: ReportProgress) -> int:
    """Runs in both processes; the first one waits for the other."""
    if os.environ["RANK"] == "1" and shard.kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == "1":
        raise UserError("the second one does not like it")
    distributed.barrier()
    return 0
