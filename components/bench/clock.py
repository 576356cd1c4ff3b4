"""How time is measured: the clock, its overhead, a quiet interpreter, and the statistics of blocks.

A number is the median of a block of repetitions; a result is the median of several blocks taken at different moments.
The median of a block ignores single preemptions, the spread between blocks shows what the machine was doing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class BlockStat(NamedTuple):
    """Median and median absolute deviation of one block, in the unit of its samples."""

    median: float
    mad: float
    num_samples: int


def block_stat(samples: Sequence[float]) -> BlockStat:
    """The median and the median absolute deviation from it (not scaled by 1.4826)."""
    median = statistics.median(samples)
    return BlockStat(float(median), float(statistics.median(abs(x - median) for x in samples)), len(samples))


def clock_for(device: torch.device) -> Callable[[], int]:
    """A nanosecond clock that waits for the device first, where work is asynchronous."""
    if device.type != "cuda":
        return time.perf_counter_ns

    def after_device() -> int:
        torch.cuda.synchronize(device)
        return time.perf_counter_ns()

    return after_device


def timer_overhead_ns(clock: Callable[[], int] = time.perf_counter_ns, reps: int = 2000) -> float:
    """The median nanoseconds between two readings of the clock with nothing between them."""
    return statistics.median(-clock() + clock() for _ in range(reps))


@contextlib.contextmanager
def quiet_interpreter() -> Iterator[None]:
    """No garbage collection inside: what is alive is frozen, what dies meanwhile waits."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch uses `count` threads inside, and what it used before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def conditions(clock: Callable[[], int]) -> dict[str, Any]:
    """What a reader needs to judge timings: the load of the machine and the cost of looking at the clock."""
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {"load_average": None if load is None else load[0], "timer_overhead_ns": timer_overhead_ns(clock)}
