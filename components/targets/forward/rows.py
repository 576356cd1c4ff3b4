"""What a layer does to each row beside its linear layers, in one function of our own each: norm, rotation, gate.

Each takes PyTorch several operators, which read and write the rows anew and in bfloat16 round them in between; with one
row, calling them costs more than their work. Ours read a row, compute in float32 and round once. rows.c is compiled
where it runs (compiled.py); every function here needs that `compiled_functions` found it.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import Final

import torch
from torch import Tensor

from components.targets.forward.compiled import Functions, Heads, address, compiled_functions

SIZES_DIVIDE_BY: Final = 16
"""Numbers of a vector with AVX-512: rows and heads of other sizes are left to PyTorch."""
GATES: Final = {
    "silu": (1.0, 0.0),
    "gelu_pytorch_tanh": (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715),
}
"""a and b of act(x) = x sigmoid(a x + b x^3)."""


def normed(x: Tensor, weight: Tensor | None, floor: float) -> Tensor:
    """x w sqrt(H) / sqrt(|x|^2 + floor) of x [N, H], which is RMSNorm with floor = H eps; without w: without sqrt(H).

    weight: float32 [H].
    """
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _functions()["norm", x.dtype](*map(address, (x, weight, y)), *x.shape, floor, torch.get_num_threads())
    return y


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) up of contiguous gate_up [N, 2 I]: [N, I]. activation: of GATES."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, size, dtype=gate_up.dtype)
    _functions()["gated", gate_up.dtype](
        *map(address, (gate_up, y)), rows, size, *GATES[activation], torch.get_num_threads()
    )
    return y


def rotate(
    qkv: Tensor, kv_heads: int, norms: Tensor | None, floor: float, rotation: Tensor, slots: Tensor | None
) -> None:
    """Norm and rotate q and k of qkv [B, T, heads + 2 kv_heads, D] in place; put k and v into their slots.

    qkv: its heads lie side by side, its rows at equal distances. norms: float32 [heads + kv_heads, D] or None; floor:
    D eps. rotation: complex64 [B or 1, T, 1, D / 2], or without the first axis. slots: [B, 2 kv_heads, T, D] of the
    cache; None leaves keys and values where they are.
    """
    batch, rows, all_heads, size = qkv.shape
    assert qkv.stride()[2:] == (size, 1) and (batch == 1 or qkv.stride(0) == rows * qkv.stride(1))
    assert slots is None or slots.stride()[2:] == (size, 1)
    of = Heads(batch, rows, all_heads - 2 * kv_heads, kv_heads, size, qkv.stride(1), floor=floor)
    of.rotation_row = 2 * rotation.stride(-3)
    of.rotation_batch = 2 * rotation.stride(0) if rotation.ndim == 4 and rotation.shape[0] > 1 else 0
    if slots is not None:
        of.cache_batch, of.cache_head = slots.stride(0), slots.stride(1)
    _functions()["rotated", qkv.dtype](*map(address, (qkv, norms, rotation, slots)), byref(of), torch.get_num_threads())


def _functions() -> Functions:
    functions = compiled_functions()
    assert functions is not None
    return functions


def can_process(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether there are such functions for rows or heads of these sizes on the CPU."""
    fits = all(size % SIZES_DIVIDE_BY == 0 for size in sizes)
    return fits and (functions := compiled_functions()) is not None and ("norm", dtype) in functions
