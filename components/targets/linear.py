"""A linear layer that picks its kernel by the number of rows, because decoding (1 row) and verifying (k + 1) differ.

Two kernels: *plain* is `F.linear` (MKL on x86: a fast matrix-vector product, then a jump of about two at the second
row), *prepacked* is oneDNN on a weight stored in its own blocked layout (a dispatch of about 8 us, then nearly flat in
the number of rows). Which wins depends on shape, dtype, rows and machine, so `calibrate` times both once.
Prepacking uses private operators of PyTorch; where they are missing or refuse, everything is plain.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any, Final

import torch
from torch import Tensor

NEVER: Final = 1 << 30
"""A row count no pass reaches: `packed_from` of a layer that is always plain."""

PROBED_ROWS: Final = (1, 2, 3, 5, 8)


class Linear:
    """y = x W^T + b for x [N, in] -> [N, out], from a plain weight [out, in]; no gradients.

    packed_from: passes of at least this many rows use the prepacked weight; 1 is always, NEVER is never.
    """

    __slots__ = ("_pointwise", "bias", "in_features", "out_features", "packed", "packed_from", "weight_t")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed_from: int = NEVER) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.packed = pack(weight) if packed_from < NEVER else None
        self.packed_from = packed_from if self.packed is not None else NEVER
        self.weight_t: Tensor | None = None if self.packed_from <= 1 else weight.t()
        self._pointwise = _operators()[1] if self.packed is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= self.packed_from:
            return self._pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[misc]
        assert self.weight_t is not None
        if self.bias is None:
            return torch.mm(x, self.weight_t)
        return torch.addmm(self.bias, x, self.weight_t)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), in one kernel where that is quicker."""
        if self.bias is None and x.shape[0] < self.packed_from:
            return torch.addmm(residual, x, self.weight_t)  # type: ignore[arg-type]
        return residual + self(x)


def pack(weight: Tensor) -> Any | None:
    """The weight in oneDNN's blocked layout, or None where this build, device or dtype cannot."""
    reorder, pointwise = _operators()
    if reorder is None or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed = reorder(weight.detach().contiguous(), 1)
        pointwise(weight.new_zeros(1, weight.shape[1]), packed, None, "none", [], "")
    except (RuntimeError, NotImplementedError):  # e.g. bf16 on a CPU without avx512: plain then
        return None
    return packed


def calibrate(weight: Tensor, *, repetitions: int = 30) -> int:
    """Time both kernels on this shape and return `packed_from`: where the prepacked kernel starts to win for good.

    Probes PROBED_ROWS rows with at least four copies of the weight in turn (a layer's weight is not in the nearest
    cache when its turn comes) and compares the quick ones. A few milliseconds for small shapes.
    """
    if pack(weight) is None:
        return NEVER
    if weight.shape[0] * weight.shape[1] > 1 << 22:
        repetitions = 5
    copies = [weight.clone() for _ in range(4 if weight.numel() < 1 << 22 else 1)]
    plain = [Linear(copy) for copy in copies]
    packed = [Linear(copy, packed_from=1) for copy in copies]
    start = NEVER
    with torch.inference_mode():
        for rows in reversed(PROBED_ROWS):
            x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
            if _quick_seconds(packed, x, repetitions) >= _quick_seconds(plain, x, repetitions):
                break
            start = rows
    return start


def describe(layers: list[Linear]) -> str:
    """ "plain", "prepacked", or "mixed" with every shape's first packed row count: "mixed[1024x192>=2,4096x192>=1]"."""
    starts = {(layer.out_features, layer.in_features): layer.packed_from for layer in layers}
    if all(start >= NEVER for start in starts.values()):
        return "plain"
    if all(start <= 1 for start in starts.values()):
        return "prepacked"
    shapes = [f"{out}x{in_}>={start}" for (out, in_), start in sorted(starts.items()) if start < NEVER]
    return f"mixed[{','.join(shapes)}]"


@functools.cache
def _operators() -> tuple[Any, Any]:
    try:
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        pointwise = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None, None
    return (reorder, pointwise) if torch.backends.mkldnn.is_available() else (None, None)


def _quick_seconds(layers: list[Linear], x: Tensor, repetitions: int) -> float:
    """The fastest third of the repetitions decides: a neighbour's load makes times longer, never shorter."""
    times = []
    for repetition in range(repetitions + 3):
        begun = time.perf_counter()
        for layer in layers:
            layer(x)
        if repetition >= 3:
            times.append(time.perf_counter() - begun)
    times.sort()
    return times[math.ceil(len(times) / 6)]
