"""One of the processes that train a drafter together (processes.py); torchrun starts it with the job's file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from components.contract import Context, Draft, Features, Target, UserError
from components.drafts.settings import settings_of_method
from components.drafts.training.batches import DataChoice
from components.drafts.training.from_features import train_from_features
from components.drafts.training.interrupts import Interrupted
from components.drafts.training.loop import Schedule
from components.drafts.training.processes import Job
from components.drafts.training.ranks import Ranks
from components.outside_json import JsonObject

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: the first may be writing a checkpoint to a slow disk."""


def main(file: str) -> None:
    """Train as the job says; the first process writes the result."""
    job = Job(**json.loads(Path(file).read_text(encoding="utf-8")))
    if Path(job.refusal).is_file():  # a restart would meet the same fault
        return
    torch.set_num_threads(job.num_threads)
    on_gpu = job.context["device"].startswith("cuda")
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), Path(job.stop))
    device = f"cuda:{ranks.rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(ranks.rank)
    try:
        draft = train_from_features(
            Target(**_read(job.target)),
            Features(**_read(job.features)),
            None if job.start_from is None else Draft(**_read(job.start_from)),
            job.method,
            settings_of_method(job.method, {job.method: job.settings}),
            Schedule(**job.schedule),
            DataChoice(**job.choice),
            _context(job, ranks, device),
            ranks=ranks,
        )
        if ranks.is_first:
            Path(job.result).write_text(json.dumps(dict(draft.info)), encoding="utf-8")
        ranks.wait()
    except Interrupted:
        pass  # all of them, at the same step; whoever started them knows
    except UserError as error:
        Path(job.refusal).write_text(str(error), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _read(handle: JsonObject) -> JsonObject:
    return {**handle, "path": Path(handle["path"])}


def _context(job: Job, ranks: Ranks, device: str) -> Context:
    """The step's own context in the first process; the others report nothing, and what they write is thrown away."""
    out, scratch = Path(job.context["out"]), Path(job.context["scratch"])
    if not ranks.is_first:
        out = scratch / f"process-{ranks.rank}"
        out.mkdir(exist_ok=True)
    return Context(
        key=job.context["key"],
        out=out,
        scratch=scratch,
        device=device,
        seed=job.context["seed"],
        num_threads=job.num_threads,
        send=_sender(job.events) if ranks.is_first else None,
    )


def _sender(pipe: str) -> Callable[[Mapping[str, Any]], None]:
    """Writes events to the pipe, a line each."""
    stream = open(pipe, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 (it lasts as long as the process)

    def send(event: Mapping[str, Any]) -> None:
        stream.write(json.dumps(event) + "\n")

    return send


if __name__ == "__main__":
    main(sys.argv[1])
