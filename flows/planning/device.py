"""Chooses the device of a run without importing torch, and lists the machine facts recorded beside a result."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
from pathlib import Path

from components.contract import UserError

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
    "pyarrow",
    "prefect",
    "mlflow",
    "duckdb",
)


def resolve_device(device: str) -> str:
    """`auto` becomes "cuda" where a GPU and a CUDA build of torch are there, else "cpu".

    Raises:
        UserError: cuda was asked for and cannot work here, or the name is unknown.
    """
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: unknown device (known: auto, cpu, cuda, cuda:N)")
    if device != "cpu" and not has_cuda():
        raise UserError(f"--device {device}: no GPU that torch can use here; leave it out to run on the CPU")
    return device


@functools.cache
def has_cuda() -> bool:
    """A GPU is visible and the installed torch is built for CUDA (its version file says so; it is not imported)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None


@functools.cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries that can change a result."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """The CPU's vector extensions, by which libraries choose their kernels."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ()
    pattern = re.compile(r"avx|amx|fma|bf16|fp16|sve|asimd|neon|sse4")
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted({word for word in value.split() if pattern.match(word)}))
    return ()
