"""Reads the processor's state while time is measured: clock, temperature, limits, governor.

A time measured on a throttled processor, or with a power-saving governor, holds for that state only. The state of a GPU
comes from the driver's tool, that of a CPU from the operating system. Unknown facts are absent.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

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


def device_state(device: torch.device) -> dict[str, Any]:
    """The current facts. Takes up to 0.1 s on a GPU: call it between blocks, not inside one."""
    return _gpu_state(device) if device.type == "cuda" else _cpu_state()


def clock_mhz(state: dict[str, Any]) -> float | None:
    """The clock of the computing device, from `device_state`; None where unknown."""
    megahertz = state.get("sm_clock_mhz", state.get("cpu_clock_mhz"))
    return None if megahertz is None else float(megahertz)


def _cpu_state() -> dict[str, Any]:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    state: dict[str, Any] = {"num_physical_cores": psutil.cpu_count(logical=False)}
    if frequency is not None and frequency.current:
        state["cpu_clock_mhz"] = round(frequency.current, 1)
    if GOVERNOR.is_file():
        state["governor"] = GOVERNOR.read_text(encoding="ascii").strip()
    return state


def _gpu_state(device: torch.device) -> dict[str, Any]:
    """The GPU_FIELDS that the driver knows; {} where its tool is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    # Driver and torch may number devices differently; the UUID is the same for both.
    gpu_id = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = [tool, f"--id={gpu_id}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return parse_gpu_state(done.stdout) if done.returncode == 0 else {}


def parse_gpu_state(line: str) -> dict[str, Any]:
    """One CSV line of the tool by our names; numeric fields as float, unknown ones left out."""
    values = [value.strip() for value in line.strip().split(",")]
    if len(values) != len(GPU_FIELDS):
        return {}
    state: dict[str, Any] = {}
    for name, value in zip(GPU_FIELDS.values(), values, strict=True):
        if value.startswith(("[", "N/A")) or not value:
            continue
        try:
            state[name] = float(value)
        except ValueError:
            state[name] = value
    return state
