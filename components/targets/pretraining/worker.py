"""One extra process of a data-parallel training run: `python -m components.targets.pretraining.worker SCRATCH RANK`.

Process 0 (the step itself) starts it, after it wrote `plan.json` and the token streams into the scratch folder. When
process 0 dies, the next gradient exchange fails here and ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import components
from components.targets.pretraining.plan import TrainingPlan, plan_from_json
from components.targets.pretraining.training_run import TrainingRun, join_group, keep_freed_memory, leave_group

RENDEZVOUS = "rendezvous"
STREAM_FILES = ("tokens.npy", "decay_tokens.npy")
"""Training tokens before the decay and during it, in the scratch folder."""


@contextmanager
def extra_processes(plan: TrainingPlan, scratch: Path) -> Iterator[Path]:
    """Run processes 1 .. num_processes - 1 while the body runs; yields the rendezvous file."""
    meeting = scratch / f"{RENDEZVOUS}-{uuid.uuid4().hex}"
    (scratch / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    root = str(Path(components.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "components.targets.pretraining.worker", str(scratch), str(meeting)]
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment, stdin=subprocess.DEVNULL)
        for rank in range(1, plan.num_processes)
    ]
    try:
        yield meeting
    except BaseException:
        for worker in workers:
            worker.terminate()
        raise
    finally:
        for worker in workers:
            worker.wait()
        meeting.unlink(missing_ok=True)


def main(scratch: Path, meeting: Path, rank: int) -> None:
    """Train beside process 0 until the plan is done."""

    torch.set_num_threads(1)
    keep_freed_memory()
    plan = plan_from_json(json.loads((scratch / "plan.json").read_text(encoding="utf-8")))
    join_group(meeting, rank, plan.num_processes)
    stable, decay = (np.load(scratch / name, mmap_mode="r", allow_pickle=False) for name in STREAM_FILES)
    TrainingRun(plan, (stable, decay), scratch, rank).train(None)
    leave_group(plan.num_processes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
