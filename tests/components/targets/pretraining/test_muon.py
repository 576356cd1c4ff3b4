"""Muon steps in float32 as in bfloat16, and which one is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from components.targets.pretraining.muon import Float32Muon, make_muon, multiplies_bfloat16


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
        assert type(make_muon([nn.Parameter(torch.zeros(2, 3))], torch.device("cpu"))) is kind
