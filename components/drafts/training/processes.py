"""Several training processes for one drafter: PyTorch's elastic agent (torchrun) starts them and watches over them.

Each runs `train_from_features` (worker.py) with its rank. When one dies, the agent ends the others and starts all
again; they go on from the last checkpoint, MOST_RESTARTS times. The first writes the drafter's files; what it reports
comes through a named pipe. A fault of the input ends all of them without a restart. An interrupt of the process that
started them becomes a file which the first one looks for after every step: all save at the same one and end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from components.contract import Artifact, Context, Draft, Features, Target, UserError
from components.drafts.settings import Settings
from components.drafts.training.batches import DataChoice
from components.drafts.training.interrupts import Interrupted, held_back
from components.drafts.training.loop import Schedule
from components.outside_json import JsonObject

MOST_RESTARTS: Final = 3
END: Final = "end"


@dataclass(frozen=True)
class Job:
    """What the processes are told, as JSON in a file: the arguments of `train_from_features` and what is theirs."""

    target: JsonObject
    features: JsonObject
    start_from: JsonObject | None
    method: str
    settings: JsonObject  # the method's
    schedule: JsonObject
    choice: JsonObject
    context: JsonObject
    num_threads: int  # of each process
    events: str  # the pipe that the first one writes lines of JSON to
    result: str  # a file: the facts about the finished drafter
    refusal: str  # a file: the message of a UserError
    stop: str  # a file: once it exists, they save a checkpoint and end


def train_in_processes(
    target: Target,
    features: Features,
    start_from: Draft | None,
    method: str,
    settings: Settings,
    schedule: Schedule,
    choice: DataChoice,
    ctx: Context,
) -> Draft:
    """Train a drafter in `schedule.processes` processes of this machine; on GPUs each has one of its own."""
    number = schedule.processes
    if ctx.device.startswith("cuda") and torch.cuda.device_count() < number:
        raise UserError(
            f"train_draft: processes: {number} need a GPU each and there are {torch.cuda.device_count()}; set processes"
        )
    num_threads = max(1, ctx.num_threads // number)
    temporary = tempfile.TemporaryDirectory()
    stop = Path(temporary.name) / "stop"
    with held_back(stop.touch), temporary as folder:
        job = Job(
            target=_handle(target),
            features=_handle(features),
            start_from=None if start_from is None else _handle(start_from),
            method=method,
            settings=settings.model_dump(mode="json"),
            schedule=asdict(schedule),
            choice=asdict(choice),
            context={
                "key": ctx.key,
                "out": str(ctx.out),
                "scratch": str(ctx.scratch),
                "device": ctx.device,
                "seed": ctx.seed,
            },
            num_threads=num_threads,
            events=str(Path(folder) / "events"),
            result=str(Path(folder) / "result.json"),
            refusal=str(Path(folder) / "refusal.txt"),
            stop=str(stop),
        )
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        with _events(Path(job.events), ctx):
            code = _run_agent(number, num_threads, file, job)
        if stop.exists():
            raise Interrupted(f"interrupted: the {number} processes have ended, at their last checkpoint")
        if Path(job.refusal).is_file():
            raise UserError(Path(job.refusal).read_text(encoding="utf-8"))
        if code != 0:
            raise RuntimeError(
                f"train_draft: the {number} processes ended with code {code} after {MOST_RESTARTS} restarts; the log of"
                " the step has their errors"
            )
        return Draft.of_step(ctx, json.loads(Path(job.result).read_text(encoding="utf-8")))


def _run_agent(number: int, num_threads: int, file: Path, job: Job) -> int:
    """Run torchrun to its end; returns its exit code."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(number), "--max-restarts", str(MOST_RESTARTS)),
        *("-m", "components.drafts.training.worker", str(file)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    # A store of its own for each start: in a shared one gloo finds the addresses of processes that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if not job.context["device"].startswith("cuda"):
        # By default gloo takes the interface of the host's name, which may not even resolve.
        environment["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    # In a session of its own: the agent ends all at once when a signal to this process's group reaches it.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


@contextmanager
def _events(pipe: Path, ctx: Context) -> Iterator[None]:
    """Send on what is written to the pipe while it lasts."""
    os.mkfifo(pipe)
    # Open for both, so that it neither waits for a writer nor ends with one that is restarted.
    handle = os.open(pipe, os.O_RDWR)

    def forward() -> None:
        with os.fdopen(handle, encoding="utf-8") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:  # a process was killed while it wrote a long line
                    continue
                if event == END:
                    return
                if ctx.send is not None:
                    ctx.send(event)

    reader = threading.Thread(target=forward, name="events of the training processes")
    reader.start()
    try:
        yield
    finally:
        with pipe.open("w", encoding="utf-8") as writer:
            writer.write(json.dumps(END) + "\n")
        reader.join()


def _handle(artifact: Artifact) -> JsonObject:
    return {"key": artifact.key, "path": str(artifact.path), "info": dict(artifact.info)}
