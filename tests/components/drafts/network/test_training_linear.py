"""A layer multiplied by oneDNN has the values and gradients of nn.Linear, and repeats bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from components.drafts.network import training_linear
from components.drafts.network.training_linear import TrainingLinear, linear


def both(rows: int, size: int, out: int) -> tuple[TrainingLinear, nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer, plain = TrainingLinear(size, out), nn.Linear(size, out, bias=False)
    plain.load_state_dict(layer.state_dict())
    return layer, plain, torch.randn(2, rows, size)


@pytest.mark.parametrize("rows, size, out", [(1, 8, 1), (7, 48, 96), (96, 192, 64)])
def test_values_and_gradients_are_those_of_a_plain_layer(rows: int, size: int, out: int) -> None:
    layer, plain, x = both(rows, size, out)
    found: list[tuple[Tensor, ...]] = []
    expected: list[tuple[Tensor, ...]] = []
    for into, one in ((found, layer), (found, layer), (expected, plain)):
        given = x.transpose(0, 1).clone().transpose(0, 1).requires_grad_()  # as after attention: not contiguous
        one.zero_grad()
        said = one(one(given).tanh() @ one.weight)  # used twice: its gradients are added up
        said.square().sum().backward()
        assert given.grad is not None and one.weight.grad is not None
        into.append((said.detach(), given.grad, one.weight.grad.clone()))
    for again, once, right in zip(*found, expected[0], strict=True):
        assert torch.equal(again, once)
        torch.testing.assert_close(once, right, atol=1e-4, rtol=1e-4)


def test_what_is_frozen_gets_no_gradient() -> None:
    layer, _, x = both(5, 16, 8)
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    layer.requires_grad_()
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


def test_a_second_derivative_is_refused_and_not_taken_for_zero() -> None:
    layer, _, x = both(5, 16, 8)
    (once,) = torch.autograd.grad(layer(x.requires_grad_()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_elsewhere_it_is_a_plain_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, plain, x = both(5, 16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), plain(x)) and layer(x).dtype == torch.bfloat16
    assert linear(x.double(), layer.weight.double()).dtype == torch.float64
    assert layer(x[:, :0]).shape == (2, 0, 8) and layer(x[0, 0]).shape == (8,)
    assert linear(x, layer.weight[:0]).shape == (2, 5, 0)
    monkeypatch.setattr(training_linear, "_product", lambda: None)  # a build of torch without the operator
    assert torch.equal(layer(x), plain(x))
