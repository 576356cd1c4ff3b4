"""How time is measured: the clock, its overhead, a quiet interpreter, and the statistics of blocks.

Totals are wall-clock times, read after the device has finished. Phases inside a generation are marked by a stopwatch:
on a CPU the same clock, on a GPU CUDA events, which the device stamps, so that reading them does not make host and
device wait for each other.

A slice, some tens of milliseconds long, is summarised by its median round, and a block by its quietest slices: other
work makes times longer, never shorter. Blocks are measured at different moments and in several processes.
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
from components.speedup.steady import steady


class BlockStat(NamedTuple):
    """The steady median of one block and its median absolute deviation, in the unit of its samples."""

    median: float
    mad: float
    num_samples: int


def slices_stat(slices: Sequence[Sequence[float]]) -> BlockStat:
    """The median of each slice's samples, steady over the slices; and their median absolute deviation (not scaled).

    A slice's median ignores single preemptions; using the quietest slices ignores disturbances longer than a slice.
    """
    medians = [statistics.median(samples) for samples in slices]
    middle = steady(medians)
    deviations = [abs(x - middle) for samples in slices for x in samples]
    return BlockStat(middle, float(statistics.median(deviations)), len(deviations))


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
    """Disable garbage collection inside; live objects are frozen."""
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
    """Set torch's thread count inside, and restore it afterwards."""
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
    """Facts that qualify timings: load_average, timer_overhead_ns and device_state."""
    return {
        "load_average": load_average(),
        "timer_overhead_ns": timer_overhead_ns(clock_for(device)),
        "device_state": device_state(device),
    }
