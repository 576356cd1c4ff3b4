"""C functions of a forward pass on a CPU, compiled on the machine that runs them.

The C compiler (CC, else `cc`) makes one library of this folder's sources at first use, which is kept in the user's
cache folder: never in a home, which may have come from elsewhere, since a library is code. Its loops run on PyTorch's
own threads: the library names no OpenMP runtime and finds the one that PyTorch has loaded. Without a compiler there are
no such functions, and PyTorch's operators do the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from components.machine import c_compiler, describe_machine
from components.targets.remembered import cache_folder

_NAMES: Final = ("streamed.c", "rows.c", "attention.c", "layers.c", "functions.h", "vectors.h")
SOURCES: Final = tuple(Path(__file__).with_name(name) for name in _NAMES)
FLAGS: Final = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11", "-ffp-contract=off")
SIZES_DIVIDE_BY: Final = 16
"""Numbers of a vector with AVX-512: rows and heads of other sizes are left to PyTorch."""
SECONDS_TO_COMPILE: Final = 300
"""After which the compiler is given up: it takes some seconds."""

_NUMBERS: Final = ctypes.c_void_p
"""The address of a tensor's numbers; None where there is none."""
_COUNT, _THREADS, _NUMBER = ctypes.c_long, ctypes.c_int, ctypes.c_float


def _struct(counts: str, numbers: str, addresses: str = "") -> list[tuple[str, Any]]:
    """The fields of a record in C: addresses first, then counts, then numbers."""
    kinds = ((addresses, _NUMBERS), (counts, _COUNT), (numbers, _NUMBER))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class Heads(ctypes.Structure):
    """Of which heads rows of q, k and v consist, and where keys and values go: functions.h says what each field is."""

    _fields_ = _struct(
        "batch rows heads kv_heads size apart rotation_batch rotation_row cache_batch cache_head",
        "floor",
    )


class Sight(ctypes.Structure):
    """Of which heads queries consist and which columns they see: functions.h says what each field is."""

    _fields_ = _struct(
        "batch rows heads kv_heads size query_batch query_row key_batch key_head first stop mask_batch mask_row",
        "scale",
    )


class LayerWeights(ctypes.Structure):
    """The weights of a layer: layers.c says what each field is, as of the next three."""

    _fields_ = _struct(
        "view rope",
        "",
        "qkv qkv_bias out out_bias gate_up gate_up_bias down down_bias attention_norm mlp_norm head_norms sinks",
    )


class LayerView(ctypes.Structure):
    """What layers of one window see."""

    _fields_ = _struct("first batch row", "", "mask")


class LayerRope(ctypes.Structure):
    """The rotations of layers of one kind."""

    _fields_ = _struct("batch row", "", "angles")


class LayerPass(ctypes.Structure):
    """The sizes of a pass through all layers."""

    _fields_ = _struct(
        "layers batch rows hidden inner heads kv_heads size cache_layer cache_batch cache_head start",
        "floor head_floor scale gate_a gate_b",
    )


Name = Literal["streamed", "norm", "gated", "rotated", "attention", "finish", "layers"]
_ARGUMENTS: Final[dict[Name, Sequence[Any]]] = {
    "streamed": (*[_NUMBERS] * 4, *[_COUNT] * 3, _THREADS),
    "norm": (*[_NUMBERS] * 3, *[_COUNT] * 2, _NUMBER, _THREADS),
    "gated": (*[_NUMBERS] * 2, *[_COUNT] * 2, *[_NUMBER] * 2, _THREADS),
    "rotated": (*[_NUMBERS] * 4, ctypes.POINTER(Heads), _THREADS),
    "attention": (*[_NUMBERS] * 7, ctypes.POINTER(Sight), _THREADS),
    "finish": (*[_NUMBERS] * 4, ctypes.POINTER(LayerWeights), ctypes.POINTER(LayerPass), _THREADS),
    "layers": (*[_NUMBERS] * 7, ctypes.POINTER(LayerPass), _THREADS),
}
Functions = dict[tuple[Name, torch.dtype], Callable[..., None]]


@functools.cache
def compiled_functions() -> Functions | None:
    """Every function of the library in float32 and bfloat16; None where nothing can be compiled or loaded."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):  # no compiler, no cache folder, or another OpenMP than GNU's
        return None
    functions: Functions = {}
    for name, arguments in _ARGUMENTS.items():
        for dtype, ending in ((torch.float32, "f32"), (torch.bfloat16, "b16")):
            function = getattr(library, f"{name}_{ending}")
            function.argtypes, function.restype = arguments, None
            functions[name, dtype] = function
    return functions


def can_run(device: torch.device, dtype: torch.dtype, *sizes: int) -> bool:
    """Whether there are functions for rows or heads of these sizes: numbers of whole vectors, on a CPU."""
    is_known = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return is_known and all(size % SIZES_DIVIDE_BY == 0 for size in sizes) and compiled_functions() is not None


def run(name: Name, dtype: torch.dtype, tensors: Sequence[Tensor | None], *arguments: Any) -> None:
    """Run a function of the library on these tensors, which it takes first, by PyTorch's number of threads."""
    functions = compiled_functions()
    assert functions is not None, "it was not asked whether it can run"
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
    functions[name, dtype](*addresses, *arguments, torch.get_num_threads())


def _compiled() -> Path:
    """The library for these sources and this processor, compiled if it is not there.

    Raises:
        OSError: the compiler or the cache folder cannot be used.
        subprocess.SubprocessError: it does not compile.
    """
    compiler = c_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    digest = hashlib.sha256("\n".join((compiler, *FLAGS, describe_machine().machine_id, sys.platform)).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: others can write here, so nothing in it is run")
    compiled = folder / f"forward-{digest.hexdigest()[:16]}.so"
    if not compiled.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            sources = [str(source) for source in SOURCES if source.suffix == ".c"]
            _run([compiler, *FLAGS, "-c", *sources], scratch)
            # Linked without -fopenmp: a second OpenMP runtime would have threads that fight with PyTorch's.
            objects = [f"{Path(source).stem}.o" for source in sources]
            _run([compiler, "-shared", *objects, "-o", "whole.so"], scratch)
            os.replace(Path(scratch) / "whole.so", compiled)
    return compiled


def _run(command: list[str], folder: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS_TO_COMPILE, cwd=folder)
