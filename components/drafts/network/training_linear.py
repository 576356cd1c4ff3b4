"""Linear layers of a training graph by oneDNN: matrix products on a CPU at twice the speed.

torch multiplies float32 matrices by MKL, which on AMD's processors does not use all of their vector width; oneDNN,
which torch has on board for bfloat16, compiles its kernels for the processor at hand. One core of an EPYC 9005 at the
shapes of a drafter of width 192: MKL 92 to 108 GFLOP/s, oneDNN 193 to 239, forwards and backwards. The products are
the same up to rounding, and repeat bit for bit. On Intel's processors, and on AMD's that do 512 bits in two halves (Zen
4), both are equal but for the weights' gradient, for which oneDNN copies its transposed inputs (Xeon, [2048, 1536] and
[2048, 512]: 160 against 90 GFLOP/s; EPYC 9004, [1024, 512] and [1024, 4096]: 160 against 138): there MKL has it.

The operator is private to PyTorch. It is tested once on known products, including transposed views; where it is missing
or wrong, on a GPU and under autocast, the layer is nn.Linear. Shapes: x [..., in], weight [out, in], y [..., out].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [R, in], weight [out, in]) -> x weight^T; either may be a transposed view."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """As F.linear: x weight^T, with gradients for both."""
    unsupported = x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32
    if unsupported or x.numel() == 0 or weight.numel() == 0 or torch.is_autocast_enabled("cpu") or _product() is None:
        return F.linear(x, weight)
    y: Tensor = _Linear.apply(x, weight)
    return y


@final
class TrainingLinear(nn.Linear):
    """nn.Linear without a bias, by `linear`."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = _product()
        assert product is not None
        return product(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # autograd would treat the operator as a constant: a second derivative of zero
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, inputs = (part.reshape(-1, part.shape[-1]) for part in (gradients[0], x))
        product = _product()
        assert product is not None
        for_x = product(rows, weight.t()).view(x.shape) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return for_x, None
        return for_x, rows.t() @ inputs if _mkl_is_as_fast() else product(rows.t(), inputs.t())


@functools.cache
def _mkl_is_as_fast() -> bool:
    capabilities = torch.cpu.get_capabilities()
    maker, full_width = str(capabilities.get("cpu_name", "")), capabilities.get("avx_vnni", False)
    return maker.startswith("Intel") or (maker.startswith("AMD") and not full_width)  # of AMD's, Zen 5 has AVX-VNNI


@functools.cache
def _product() -> Product | None:
    """oneDNN's product, where this build of torch has it and its results are correct."""
    try:
        pointwise = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None

    def product(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = pointwise(x, weight, None, "none", [], "")
        return y

    x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3) - 5.0  # exact in any order of sums
    cases = ((x, weight), (x @ weight.t(), weight.t()), ((x @ weight.t()).t(), x.t()))
    try:
        with torch.no_grad():
            correct = all(torch.equal(product(a, b), a @ b.t()) for a, b in cases)
    except (RuntimeError, NotImplementedError):
        return None
    return product if correct else None
