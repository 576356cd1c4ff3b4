"""One of the processes that train a drafter together (processes.py); torchrun starts it with the place of the store."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from components.contract import Context, Draft, Features, Target, UserError
from components.drafts.settings import settings_of_method
from components.drafts.training.batches import DataChoice
from components.drafts.training.from_features import train_from_features
from components.drafts.training.interrupts import Interrupted
from components.drafts.training.loop import Schedule
from components.drafts.training.processes import EVENTS, JOB, REFUSAL, RESULT, STOP, Job, connect
from components.drafts.training.ranks import Ranks
from components.outside_json import JsonObject

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others: the first may be writing a checkpoint to a slow disk."""


def main(endpoint: str) -> None:
    """Train as the job says; the first process leaves the result."""
    store = connect(endpoint)
    job = Job(**json.loads(store.get(JOB)))
    if store.check([REFUSAL]):  # a restart would meet the same fault
        return
    torch.set_num_threads(job.num_threads)
    dist.init_process_group("nccl" if job.on_gpu else "gloo", timeout=PATIENCE)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), lambda: store.check([STOP]))
    device = "cpu"
    if job.on_gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    try:
        draft = train_from_features(
            Target(**_read(job.target)),
            Features(**_read(job.features)),
            None if job.start_from is None else Draft(**_read(job.start_from)),
            job.method,
            settings_of_method(job.method, {job.method: job.settings}),
            Schedule(**job.schedule),
            DataChoice(**job.choice),
            _context(job, ranks, device, store),
            ranks=ranks,
        )
        if ranks.is_first:
            store.set(RESULT, json.dumps(dict(draft.info)))
        ranks.wait()
    except Interrupted:
        pass  # all of them, at the same step; whoever started them knows
    except UserError as error:
        store.set(REFUSAL, str(error))
    finally:
        dist.destroy_process_group()


def _read(handle: JsonObject) -> JsonObject:
    return {**handle, "path": Path(handle["path"])}


def _context(job: Job, ranks: Ranks, device: str, store: dist.TCPStore) -> Context:
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
        send=(lambda event: store.queue_push(EVENTS, json.dumps(event))) if ranks.is_first else None,
    )


if __name__ == "__main__":
    main(sys.argv[1])
