"""A linear layer of our own for 1 to 8 rows, compiled on the machine that runs it: it reads a weight once for all rows.

PyTorch's products on a processor without AVX-512 read a weight once for every row or two in bfloat16, and in float32
take three times as long for two rows as for one. Verification has k + 1 rows, so that is what drafting costs there.

streamed.c is compiled by the C compiler (CC, else `cc`) at first use and kept in the user's cache folder: never in a
home, which may have come from elsewhere, since a library is code. Its loops run on PyTorch's own threads: the library
names no OpenMP runtime and finds the one that PyTorch has loaded. Without a compiler there is no such kernel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from components.machine import c_compiler, describe_machine
from components.targets.remembered import cache_folder

SOURCE: Final = Path(__file__).with_name("streamed.c")
MOST_ROWS: Final = 8
INPUTS_DIVIDE_BY: Final = 32
MOST_INPUTS: Final = 1 << 16
"""Inputs whose eight rows in float32, 2 MiB, still lie well on a thread's stack."""
FLAGS: Final = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=gnu11", "-ffp-contract=off")
SECONDS_TO_COMPILE: Final = 300
"""After which the compiler is given up: it takes a second or two."""

_Function = Callable[..., None]


def can_stream(weight: Tensor) -> bool:
    """Whether there is such a kernel for this weight [out, in]: it is compiled if need be."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    fits = weight.shape[1] % INPUTS_DIVIDE_BY == 0 and weight.shape[1] <= MOST_INPUTS
    return fits and weight.is_contiguous() and functions() is not None


def streamed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, contiguous [N, out], of x [N, in] with N from 1 to MOST_ROWS; see `can_stream`.

    A row of the result is the same to the bit whatever rows are beside it.
    """
    compiled = functions()
    assert compiled is not None and 1 <= x.shape[0] <= MOST_ROWS and x.dtype == weight.dtype
    x = x.contiguous()
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    pointers = (None if each is None else each.data_ptr() for each in (weight, x, bias, y))
    compiled[x.dtype](*pointers, *weight.shape, x.shape[0], torch.get_num_threads())
    return y


@functools.cache
def functions() -> dict[torch.dtype, _Function] | None:
    """The compiled function of each dtype; None where nothing can be compiled or loaded."""
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError):  # no compiler, no cache folder, or another OpenMP than GNU's
        return None
    found: dict[torch.dtype, _Function] = {}
    for dtype, name in ((torch.float32, "streamed_f32"), (torch.bfloat16, "streamed_b16")):
        function = getattr(library, name)
        function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3 + [ctypes.c_int]
        function.restype = None
        found[dtype] = function
    return found


def _compiled() -> Path:
    """The library for this source and processor, compiled if it is not there.

    Raises:
        OSError: the compiler or the cache folder cannot be used.
        subprocess.SubprocessError: it does not compile.
    """
    compiler = c_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    what = "\n".join((compiler, *FLAGS, describe_machine().machine_id, sys.platform))
    digest = hashlib.sha256(what.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: others can write here, so nothing in it is run")
    library = folder / f"streamed-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            half, whole = Path(own) / "streamed.o", Path(own) / "streamed.so"
            _run([compiler, *FLAGS, "-c", str(SOURCE), "-o", str(half)])
            # Linked without -fopenmp: a second OpenMP runtime would have threads that fight with PyTorch's.
            _run([compiler, "-shared", str(half), "-o", str(whole)])
            os.replace(whole, library)
    return library


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS_TO_COMPILE)
