"""Drawing tokens: one generator on the CPU, so that a seed means the same tokens on every device.

The distribution itself (temperature, top-k, top-p) is `drafts.sampling.probabilities`, which target and drafter share:
cut only one of them and tokens that the cut target can never say are proposed and paid for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.drafts.draft import Sampling


def is_greedy(sampling: Sampling) -> bool:
    """Temperature 0 means the argmax, without any draw."""
    return sampling.temperature <= 0.0


def draw(probs: Tensor, rng: torch.Generator) -> Tensor:
    """One token for each row: probabilities [N, V] -> int64 [N] on the same device; `rng` lives on the CPU."""
    return torch.multinomial(probs.cpu(), 1, generator=rng).squeeze(-1).to(probs.device)


def draw_uniform(count: int, device: torch.device, rng: torch.Generator) -> Tensor:
    """`count` numbers in [0, 1), float32 [count]."""
    return torch.rand(count, generator=rng).to(device)
