"""The feed-forward part of a layer gives what its definition gives, by one MLP or by the experts of each row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from components.targets.forward import mlp as mlp_module
from components.targets.forward.architecture import ClampedSwiglu
from components.targets.forward.linear import Linear
from components.targets.forward.mlp import Experts, Mlp

WIDTH, INNER, COUNT, CHOSEN = 12, 20, 5, 2


def mixture(is_normalised: bool, is_biased: bool) -> Experts:
    dice = torch.Generator().manual_seed(2)

    def linear(rows: int, columns: int) -> Linear:
        bias = torch.randn(rows, generator=dice) if is_biased else None
        return Linear(torch.randn(rows, columns, generator=dice) / columns**0.5, bias)

    experts = [Mlp(linear(2 * INNER, WIDTH), linear(WIDTH, INNER), "silu") for _ in range(COUNT)]
    return Experts(linear(COUNT, WIDTH), experts, CHOSEN, is_normalised)


def by_definition(experts: Experts, x: Tensor) -> Tensor:
    """One row: every expert runs, and those that the router did not choose weigh nothing."""
    scores = experts.router(x[None])[0].softmax(-1)
    chosen = scores.sort(descending=True).indices[:CHOSEN]
    weights = torch.zeros(COUNT).index_copy_(0, chosen, scores[chosen])
    if experts.is_normalised:
        weights /= weights.sum()
    outputs = []
    for mlp in experts.experts:
        gate, up = mlp.gate_up(x[None])[0].split(INNER)
        outputs.append(mlp.down((F.silu(gate) * up)[None])[0])
    return (weights[:, None] * torch.stack(outputs)).sum(0)


@pytest.mark.parametrize(("is_normalised", "is_biased"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 40])
def test_rows_get_what_their_own_experts_give(num_rows: int, is_normalised: bool, is_biased: bool) -> None:
    experts = mixture(is_normalised, is_biased)
    x, residual = torch.randn(2, num_rows, WIDTH, generator=torch.Generator().manual_seed(num_rows))
    expected, before = torch.stack([by_definition(experts, row) for row in x]), residual.clone()
    torch.testing.assert_close(experts(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(experts.add_to(residual, x), residual + expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(residual, before), "a tapped residual is read later"


@pytest.mark.parametrize(
    ("activation", "gated", "up"),
    [
        ("gelu_pytorch_tanh", functools.partial(F.gelu, approximate="tanh"), 1.5),
        (ClampedSwiglu(1.7, 2.0), lambda gate: gate * torch.sigmoid(1.7 * gate), 2.5),
        (ClampedSwiglu(1.7, 1.2), lambda gate: gate.clamp(max=1.2) * torch.sigmoid(1.7 * gate.clamp(max=1.2)), 2.2),
    ],
)
def test_an_mlp_applies_its_activation(activation: Any, gated: Callable[[Tensor], Tensor], up: float) -> None:
    """Every up is the sum 1.5; up: what it counts as."""
    mlp = Mlp(Linear(torch.cat([torch.eye(3), torch.ones(3, 3)])), Linear(torch.eye(3)), activation)
    x = torch.tensor([[0.5, -1.0, 2.0]])
    torch.testing.assert_close(mlp(x), gated(x) * up)
    torch.testing.assert_close(mlp.add_to(x, x), x + mlp(x))


def test_many_rows_pass_an_mlp_in_pieces_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = torch.Generator().manual_seed(3)
    up, down = (torch.randn(size, generator=dice) for size in ((2 * INNER, WIDTH), (WIDTH, INNER)))
    x, residual = torch.randn(2, 11, WIDTH, generator=dice)
    mlp = Mlp(Linear(up), Linear(down), "silu")
    whole, added, widest = mlp(x), mlp.add_to(residual, x), []
    inner = Mlp.inner
    monkeypatch.setattr(Mlp, "inner", lambda self, rows: (widest.append(len(rows)), inner(self, rows))[1])
    monkeypatch.setattr(mlp_module, "ROWS_AT_ONCE", 4)
    torch.testing.assert_close(mlp(x), whole)
    torch.testing.assert_close(mlp.add_to(residual, x), added)
    assert widest == [4, 4, 3] * 2
