"""Describes the machine of a measurement without importing torch, since `flows` needs it at plan time.

Library versions come from installed metadata, the processor from the operating system, a GPU's name from its driver's
tool.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from components.contract import Machine, UserError

LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
# Instruction sets that change which matrix kernels run, and with them both speed and rounding.
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def describe_machine(device: str = "cpu") -> Machine:
    """The facts of this machine; `machine_id` changes when hardware, torch or device do.

    device: "cpu", "cuda" or "cuda:N", already resolved.
    Raises UserError for a CUDA device that no driver on this machine knows.
    """
    cpu_model, features = _processor()
    versions = {"python": platform.python_version(), **_library_versions()}
    device_name = _gpu_name(device) if device.startswith("cuda") else cpu_model
    ram_gib = round(psutil.virtual_memory().total / 2**30, 1)
    identity = {
        "cpu_model": cpu_model,
        "cpu_features": features,
        "num_cores": num_usable_cores(),
        # Whole GiB: kernels reserve slightly different amounts from boot to boot.
        "ram_gib": round(ram_gib),
        "device": device,
        "device_name": device_name,
        "architecture": platform.machine(),
        "torch": versions.get("torch", "absent"),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Machine(
        machine_id=digest[:16],
        cpu_model=cpu_model,
        num_cores=num_usable_cores(),
        ram_gib=ram_gib,
        device=device,
        device_name=device_name,
        os=f"{platform.system()} {platform.release()}",
        versions=versions,
    )


def c_compiler() -> str | None:
    """The path of the C compiler, CC or `cc`, which makes decoding quicker; None where there is none."""
    return shutil.which(os.environ.get("CC") or "cc")


def num_usable_cores() -> int:
    """Cores this process may use: its affinity, and a container's share where its control group sets one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.is_file():
        quota, _, period = limit.read_text(encoding="ascii").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def free_ram() -> int:
    """Bytes of memory that a program can still get here; at most what a container may have at all."""
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    free = int(psutil.virtual_memory().available)
    return min(free, int(text)) if text.isdigit() else free


def give_memory_back() -> None:
    """Return freed blocks to the system: glibc keeps those of reading large weights, a tenth of all that was read."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _processor() -> tuple[str, list[str]]:
    """The processor's name and those of CPU_FEATURES it has."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor() or platform.machine(), []
    facts: dict[str, str] = {}
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    return facts.get("model name", platform.machine()), [name for name in CPU_FEATURES if name in flags]


def _library_versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return versions


def _gpu_name(device: str) -> str:
    """The device's name from the NVIDIA driver, whose numbering the index follows."""
    tool = shutil.which("nvidia-smi")
    index = int(device.partition(":")[2] or 0)
    if tool is not None:
        command = [tool, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0 and index < len(names):
            return names[index]
    raise UserError(f"device {device}: no such GPU on this machine (nvidia-smi does not list it): use device cpu")
