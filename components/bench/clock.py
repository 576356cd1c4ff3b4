"""How time is measured: the clock, a quiet interpreter, the statistics of blocks, and the state of the processor.

Totals are wall-clock times, read after the device has finished. Phases inside a generation are marked by a stopwatch:
on a CPU the same clock, on a GPU CUDA events, which the device stamps, so that reading them does not make host and
device wait for each other.

A slice, some tens of milliseconds long, is summarised by its median round, and a block by its quietest slices: other
work makes times longer, never shorter. Blocks are measured at different moments and in several processes.

A time measured on a throttled processor, or with a power-saving governor, holds for that state only: so clock,
temperature, limits and governor are read too, of a GPU from the driver's tool, of a CPU from the operating system.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import psutil
import torch

from components.definitions import steady

DeviceState = dict[str, float | str | None]
"""Facts of the processor, by name; unknown ones are absent."""


class Conditions(TypedDict):
    """Facts that qualify timings. timer_overhead_ns: the time between two readings of the clock."""

    load_average: float | None
    timer_overhead_ns: float
    device_state: DeviceState


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


def timer_overhead_ns(clock: Callable[[], int] = time.perf_counter_ns) -> float:
    """The median nanoseconds between two readings of the clock with nothing between them."""
    return statistics.median(-clock() + clock() for _ in range(2000))


@contextlib.contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Disable garbage collection inside."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
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


def conditions(device: torch.device) -> Conditions:
    """The device's current conditions."""
    return {
        "load_average": load_average(),
        "timer_overhead_ns": timer_overhead_ns(clock_for(device)),
        "device_state": device_state(device),
    }


GPU_FIELDS = {
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "max_sm_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "enforced.power.limit": "power_limit_w",
    "pstate": "performance_state",
    "clocks_throttle_reasons.active": "throttle_reasons",
    "utilization.gpu": "utilisation_percent",
}
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def device_state(device: torch.device) -> DeviceState:
    """The current facts. Takes up to 0.1 s on a GPU: call it between blocks, not inside one."""
    return _gpu_state(device) if device.type == "cuda" else _cpu_state()


def clock_mhz(state: DeviceState) -> float | None:
    """The clock of the computing device, from `device_state`; None where unknown."""
    megahertz = state.get("sm_clock_mhz", state.get("cpu_clock_mhz"))
    return None if megahertz is None else float(megahertz)


def _cpu_state() -> DeviceState:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    state: DeviceState = {"num_physical_cores": psutil.cpu_count(logical=False)}
    if frequency is not None and frequency.current:
        state["cpu_clock_mhz"] = round(frequency.current, 1)
    if GOVERNOR.is_file():
        state["governor"] = GOVERNOR.read_text(encoding="ascii").strip()
    return state


def _gpu_state(device: torch.device) -> DeviceState:
    """The GPU_FIELDS that the driver knows; {} where its tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    # Driver and torch may number devices differently; the UUID is the same for both.
    gpu_id = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [tool, f"--id={gpu_id}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return parse_gpu_state(done.stdout) if done.returncode == 0 else {}


def parse_gpu_state(line: str) -> DeviceState:
    """One CSV line of the tool by our names; numeric fields as float, unknown ones left out."""
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(GPU_FIELDS):
        return {}
    state: DeviceState = {}
    for name, value in zip(GPU_FIELDS.values(), values, strict=True):
        if value.startswith(("[", "N/A")) or not value:
            continue
        try:
            state[name] = float(value)
        except ValueError:
            state[name] = value
    return state
