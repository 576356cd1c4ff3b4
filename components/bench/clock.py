"""How time is measured: the clock, its overhead, a quiet interpreter, and the statistics of blocks.

Totals are read off the wall, after the device has finished. Phases inside a generation are marked by a stopwatch: on a
CPU the same clock, on a GPU CUDA events, which the device stamps as it gets there, so that looking does not make host
and device wait for each other.

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

from components.bench.device_state import device_state


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


class Stopwatch(NamedTuple):
    """Marks moments cheaply now, and turns them into nanoseconds later."""

    mark: Callable[[], Any]
    read: Callable[[Sequence[Any]], list[int]]  # moments -> ns after an origin common to one call


def stopwatch_for(device: torch.device) -> Stopwatch:
    """CUDA events on a GPU, the wall clock elsewhere."""
    if device.type != "cuda":
        return Stopwatch(time.perf_counter_ns, list)

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def read(events: Sequence[Any]) -> list[int]:
        torch.cuda.synchronize(device)
        return [round(events[0].elapsed_time(event) * 1e6) for event in events]

    return Stopwatch(mark, read)


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


def load_average() -> float | None:
    """The machine's load over the last minute; None where the system does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def conditions(device: torch.device) -> dict[str, Any]:
    """What a reader needs to judge timings: load, the cost of looking at the clock, the processor's state."""
    return {
        "load_average": load_average(),
        "timer_overhead_ns": timer_overhead_ns(clock_for(device)),
        "device_state": device_state(device),
    }
