"""What state the processor was in while time was measured: its clock, temperature, limits, governor.

A number taken while a processor was throttled, or on a saving governor, is true of that state only. A GPU is asked
through the driver's own tool, by the identity of the device that torch uses; a CPU through what the kernel shows. What
a machine does not tell is absent, never guessed.
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
    """The facts of now. Takes up to a tenth of a second on a GPU: ask between blocks, not inside one."""
    return _gpu_state(device) if device.type == "cuda" else _cpu_state()


def clock_mhz(state: dict[str, Any]) -> float | None:
    """The clock of what computes, from `device_state`; None where the machine does not tell."""
    found = state.get("sm_clock_mhz", state.get("cpu_clock_mhz"))
    return None if found is None else float(found)


def _cpu_state() -> dict[str, Any]:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    state: dict[str, Any] = {"num_physical_cores": psutil.cpu_count(logical=False)}
    if frequency is not None and frequency.current:
        state["cpu_clock_mhz"] = round(frequency.current, 1)
    if GOVERNOR.is_file():
        state["governor"] = GOVERNOR.read_text(encoding="ascii").strip()
    return state


def _gpu_state(device: torch.device) -> dict[str, Any]:
    """The fields above that the driver knows; {} where its tool is missing or says nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    # The driver counts devices as it likes, torch counts those that it may see: the UUID is the same for both.
    who = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    asked = [tool, f"--id={who}", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return parsed_gpu_state(done.stdout) if done.returncode == 0 else {}


def parsed_gpu_state(line: str) -> dict[str, Any]:
    """One CSV line of the tool by our names; numbers where they are numbers, what it does not know left out."""
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
