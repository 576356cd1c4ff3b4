"""What a layer does to each row beside its linear layers, in one function of our own each: norm, rotation, gate.

Each takes PyTorch several operators, which read and write the rows anew and in bfloat16 round them in between; with one
row, calling them costs more than their work. Ours read a row, compute in float32 and round once. rows.c is compiled
where it runs (compiled.py); every function here needs that it `can_run`.
"""

from __future__ import annotations

import math
from ctypes import byref
from typing import Final

import torch
from torch import Tensor

from components.targets.forward.compiled import SIZES_DIVIDE_BY, Heads, run

GATES: Final = {
    "silu": (1.0, 0.0),
    "gelu_pytorch_tanh": (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715),
}
"""a and b of act(x) = x sigmoid(a x + b x^3)."""


def normed(x: Tensor, weight: Tensor | None, floor: float) -> Tensor:
    """x w sqrt(H) / sqrt(|x|^2 + floor) of x [..., H], which is RMSNorm with floor = H eps; without w: without sqrt(H).

    weight: float32 [H].
    """
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    size = x.shape[-1]
    assert size % SIZES_DIVIDE_BY == 0
    run("norm", x.dtype, (x, weight, y), x.numel() // size, size, floor)
    return y


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """act(gate) up of contiguous gate_up [N, 2 I]: [N, I]. activation: of GATES."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert size % SIZES_DIVIDE_BY == 0
    y = torch.empty(rows, size, dtype=gate_up.dtype)
    run("gated", gate_up.dtype, (gate_up, y), rows, size, *GATES[activation])
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
    assert size % SIZES_DIVIDE_BY == 0
    assert qkv.stride()[2:] == (size, 1) and (batch == 1 or qkv.stride(0) == rows * qkv.stride(1))
    assert slots is None or slots.stride()[2:] == (size, 1)
    of = Heads(batch, rows, all_heads - 2 * kv_heads, kv_heads, size, qkv.stride(1), floor=floor)
    of.rotation_batch, of.rotation_row = rotation_strides(rotation)
    if slots is not None:
        of.cache_batch, of.cache_head = slots.stride(0), slots.stride(1)
    run("rotated", qkv.dtype, (qkv, norms, rotation, slots), byref(of))


def rotation_strides(rotation: Tensor) -> tuple[int, int]:
    """As `mask_strides` (attention.py), of rotations as `rotate` takes them, in floats."""
    of_batch = 2 * rotation.stride(0) if rotation.ndim == 4 and rotation.shape[0] > 1 else 0
    return of_batch, 2 * rotation.stride(-3)
