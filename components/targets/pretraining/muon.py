"""Muon (Jordan et al. 2024; torch.optim.Muon) in the precision that a machine multiplies."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

MUON_STATE: Final = "momentum_buffer"
"""What it keeps of each matrix."""


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether it multiplies bfloat16 natively: CUDA, avx512_bf16, AMX."""
    capabilities = torch.cpu.get_capabilities()
    return device.type == "cuda" or bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def make_muon(matrices: Any, device: torch.device, **settings: Any) -> torch.optim.Muon:
    """Muon of these matrices, or groups of them, which lie on this device; its products are in float32 without bf16."""
    kind = torch.optim.Muon if multiplies_bfloat16(device) else Float32Muon
    return kind(matrices, **settings)


class Float32Muon(torch.optim.Muon):
    """torch's Muon in float32: products of bfloat16 take 50 times as long where a processor has none (AVX2)."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every matrix that has a gradient."""
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for matrix in (one for one in group["params"] if one.grad is not None):
                mean: Tensor = self.state[matrix].setdefault(MUON_STATE, torch.zeros_like(matrix.grad))
                update = matrix.grad.lerp(mean.lerp_(matrix.grad, 1 - momentum), momentum)
                matrix.mul_(1 - rate * group["weight_decay"])
                update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.add_(update, alpha=-rate * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Nearly the nearest orthogonal matrix, by iterations of Newton and Schulz with these coefficients of a quintic."""
    of_one, of_gram, of_square = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.t() if is_tall else matrix) / matrix.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=of_gram, alpha=of_square), x, beta=of_one)
    return x.t() if is_tall else x
