"""What Muon and AdamW move, and what a scaled learning rate means."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from components.drafts.training.optimizer import Float32Muon, Optimizer, OptimizerName, multiplies_bfloat16


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


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_in_float32_steps_as_that_of_torch_does_but_for_rounding(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    settings = {"lr": 0.1, "weight_decay": 0.05}
    both = torch.optim.Muon(weights[:1], **settings), Float32Muon(weights[1:], **settings)
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for optimizer, weight in zip(both, weights, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    moved = [weight.detach() - start for weight in weights]
    assert float((moved[0] - moved[1]).norm() / moved[0].norm()) < 0.02, "bfloat16 keeps eight bits"
    buffers = [optimizer.state[weight]["momentum_buffer"] for optimizer, weight in zip(both, weights, strict=True)]
    assert torch.equal(*buffers)


def test_a_processor_without_bfloat16_steps_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, kind in (({"avx512_bf16": True}, torch.optim.Muon), ({"avx2": True}, Float32Muon)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert multiplies_bfloat16(torch.device("cpu")) == (kind is torch.optim.Muon)
        assert type(Optimizer(Toy({}), "muon", 0.0, 1.0)._parts[0]) is kind  # type: ignore[arg-type]
