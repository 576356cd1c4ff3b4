"""The feed-forward part of a layer: one MLP, or a mixture of experts.

Experts run one after the other over the rows that chose them, each read in place: rows are sorted by expert once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from components.targets.forward.architecture import Activation, ClampedSwiglu
from components.targets.forward.compiled import can_run
from components.targets.forward.linear import Linear
from components.targets.forward.rows import gated

ROWS_AT_ONCE: Final = 8192
"""Rows that one feed-forward pass takes: a prefill of many long prompts would hold gate and up of all of them."""


class Mlp(NamedTuple):
    """down(act(gate(x)) * up(x)), with gate and up as one linear layer."""

    gate_up: Linear
    down: Linear
    activation: Activation | ClampedSwiglu

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        if x.shape[0] > ROWS_AT_ONCE:
            return torch.cat([self.down(self.inner(rows)) for rows in x.split(ROWS_AT_ONCE)])
        return self.down(self.inner(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), by the last layer's own kernel where it can."""
        if x.shape[0] > ROWS_AT_ONCE:
            pieces = zip(residual.split(ROWS_AT_ONCE), x.split(ROWS_AT_ONCE), strict=True)
            return torch.cat([self.down.add_to(at, self.inner(rows)) for at, rows in pieces])
        return self.down.add_to(residual, self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """What the last layer reads, [N, intermediate size]."""
        if not isinstance(self.activation, ClampedSwiglu) and can_run(x.device, x.dtype, self.down.in_features):
            return gated(self.gate_up(x), self.activation)
        gate, up = self.gate_up(x).chunk(2, dim=1)
        if isinstance(self.activation, ClampedSwiglu):
            alpha, limit = self.activation
            gate = gate.clamp(max=limit)
            return up.clamp(-limit, limit).add_(1.0).mul_(torch.sigmoid(gate * alpha).mul_(gate))
        if self.activation == "silu":
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def linears(self) -> list[Linear]:
        """Its linear layers, in the order in which they run."""
        return [self.gate_up, self.down]


class Experts:
    """A mixture: each row goes to the `per_token` experts that the router scores highest, weighed by its softmax.

    is_normalised: whether the weights of a row's experts add up to one.
    """

    def __init__(self, router: Linear, experts: Sequence[Mlp], per_token: int, is_normalised: bool) -> None:
        self.router, self.experts = router, list(experts)
        self.per_token, self.is_normalised = per_token, is_normalised

    def __call__(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return self.add_to(torch.zeros_like(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x)."""
        weights, expert_ids = self.router(x).softmax(dim=-1, dtype=torch.float32).topk(self.per_token, dim=-1)
        if self.is_normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if x.shape[0] == 1:
            for expert, weight in zip(expert_ids[0].tolist(), weights[0].tolist(), strict=True):
                mlp = self.experts[expert]
                if mlp.down.bias is None:
                    residual = mlp.down.add_to(residual, mlp.inner(x).mul_(weight))
                else:
                    residual = torch.add(residual, mlp(x), alpha=weight)
            return residual
        by_row = expert_ids.flatten()
        order = by_row.argsort(stable=True)
        rows = order // self.per_token
        counts = by_row.bincount(minlength=len(self.experts)).tolist()
        sorted_rows, start, outputs = x[rows], 0, []
        for mlp, count in zip(self.experts, counts, strict=True):
            if count:
                outputs.append(mlp(sorted_rows.narrow(0, start, count)))
                start += count
        weighed = torch.cat(outputs).mul_(weights.flatten()[order].to(x.dtype).unsqueeze(1))
        return residual.index_add(0, rows, weighed)

    def linears(self) -> list[Linear]:
        """Its linear layers, in the order in which they run."""
        return [self.router, *(linear for mlp in self.experts for linear in mlp.linears())]
