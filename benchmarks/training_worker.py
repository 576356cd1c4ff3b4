"""Our side of the training-speed comparison: training steps on a sample file, one JSON request a line.

{"steps": N, "autocast": ""}   N optimiser steps, under autocast to a dtype where one is named; seconds, and peak
                               memory so far beyond that before the first step

  python -m benchmarks.training_worker frozen-head|trained-head|block SAMPLE DEVICE THREADS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.block_sample import read_case
from benchmarks.eagle3_sample import read_sample
from components.drafts.training.optimizer import Optimizer


def main() -> None:
    """Answer requests until stdin ends."""
    kind, file, device, threads = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(threads)
    draft, batch = read_case(file, device) if kind == "block" else read_sample(file, device, {})
    draft.train()
    if kind != "block":
        draft.lm_head.weight.requires_grad_(kind == "trained-head")
    optimizer = Optimizer(draft, "adamw", weight_decay=0.01, muon_lr_scale=1.0)
    before = resident(device)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        for _ in range(request["steps"]):
            with autocast(device, request["autocast"]):
                result = draft.losses(batch)
            optimizer.update(result.loss, 1e-4, clip_norm=1.0)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        answer = {
            "seconds": seconds,
            "peak_bytes": peak(device) - before,
            "loss": float(result.loss.detach()),
            "trained_parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
        }
        print(json.dumps(answer), flush=True)


def autocast(device: str, dtype: str) -> AbstractContextManager[Any]:
    """Autocast to a dtype, or nothing."""
    return torch.autocast(device.split(":")[0], dtype=getattr(torch, dtype)) if dtype else nullcontext()


def resident(device: str) -> int:
    """Bytes in use now: of the process, or on the GPU."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def peak(device: str) -> int:
    """The most bytes in use so far."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
