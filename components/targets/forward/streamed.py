"""A linear layer of our own for 1 to 8 rows: it reads a weight once for all rows.

PyTorch's products on a processor without AVX-512 read a weight once for every row or two in bfloat16, and in float32
take three times as long for two rows as for one. Verification has k + 1 rows, so that is what drafting costs there.
streamed.c is compiled where it runs (compiled.py).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from components.targets.forward.compiled import compiled_functions, run

MOST_ROWS: Final = 8
INPUTS_DIVIDE_BY: Final = 32
MOST_INPUTS: Final = 1 << 16
"""Inputs whose eight rows in float32, 2 MiB, still lie well on a thread's stack."""


def can_stream(weight: Tensor) -> bool:
    """Whether there is such a kernel for this weight [out, in]: it is compiled if need be."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    fits = weight.shape[1] % INPUTS_DIVIDE_BY == 0 and weight.shape[1] <= MOST_INPUTS
    return fits and weight.is_contiguous() and compiled_functions() is not None


def streamed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, contiguous [N, out], of x [N, in] with N from 1 to MOST_ROWS; see `can_stream`.

    A row of the result is the same to the bit whatever rows are beside it.
    """
    assert 1 <= x.shape[0] <= MOST_ROWS and x.dtype == weight.dtype
    x = x.contiguous()
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
    run("streamed", x.dtype, (weight, x, bias, y), *weight.shape, x.shape[0])
    return y
