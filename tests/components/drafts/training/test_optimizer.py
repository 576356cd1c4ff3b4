"""What Muon and AdamW move, and what a scaled learning rate means."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from components.drafts.training.optimizer import Optimizer, OptimizerName


class Toy(nn.Module):
    """Two linear layers and a table."""

    token_tables = frozenset({"lm_head.weight"})

    def __init__(self, lr_scales: Mapping[str, float]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.lr_scales = lr_scales
        self.fc, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.out(torch.tanh(self.fc(x)))).square().mean()


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_scaled_learning_rate_undoes_the_size_of_the_inputs(name: OptimizerName) -> None:
    """Inputs 64 times as large, weights and learning rate a 64th: the same training, step for step."""
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    plain, scaled = Toy({}), Toy({"fc.weight": 1 / 64})
    with torch.no_grad():
        scaled.fc.weight.div_(64)
    steps = [Optimizer(toy, name, 0.01, 10.0) for toy in (plain, scaled)]  # type: ignore[arg-type]
    for _ in range(20):
        norms = [
            optimizer.update(toy.loss(inputs), 2e-3, 0.1)
            for optimizer, toy, inputs in zip(steps, (plain, scaled), (x, 64 * x), strict=True)
        ]
        assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    for (part, expected), found in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(found * (64 if part == "fc.weight" else 1), expected, rtol=2e-2, atol=2e-3)


def test_muon_moves_matrices_only_and_every_parameter_moves() -> None:
    toy = Toy({})
    before = {name: parameter.detach().clone() for name, parameter in toy.named_parameters()}
    optimizer = Optimizer(toy, "muon", 0.0, 10.0)  # type: ignore[arg-type]
    optimizer.update(toy.loss(torch.ones(3, 6)), 1e-3, 1.0)
    kept = {name: set(optimizer.moments(parameter)) for name, parameter in toy.named_parameters()}
    assert kept == {
        "fc.weight": {"momentum_buffer"},
        "out.weight": {"momentum_buffer"},
        "out.bias": {"exp_avg", "exp_avg_sq"},
        "lm_head.weight": {"exp_avg", "exp_avg_sq"},
    }
    assert all(not torch.equal(parameter, before[name]) for name, parameter in toy.named_parameters())
