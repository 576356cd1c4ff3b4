"""From logits to the distribution a token is drawn from, and the draw.

Speculative sampling compares a target distribution p with a draft distribution q (Leviathan et al. 2023). Temperature,
top-k and top-p are part of both: cut only one of them and tokens that the cut target can never say are proposed and
paid for. So there is one function, used for p here and described by the same `Sampling` that the drafter is given for q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.drafts.draft import Sampling


def is_greedy(sampling: Sampling) -> bool:
    """Temperature 0 means the argmax, without any draw."""
    return sampling.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] -> probabilities [..., V] float32, after temperature, then top-k, then top-p.

    top-k keeps exactly k tokens (ties at the edge: those that torch.topk names). top-p keeps the smallest set of most
    probable tokens whose mass reaches top_p; the token that crosses the line is kept, so the set is never empty.
    """
    assert not is_greedy(sampling), "temperature 0 is greedy: take the argmax"
    scaled = logits.float() / sampling.temperature
    vocab = scaled.shape[-1]
    if 0 < sampling.top_k < vocab:
        kept, ids = scaled.topk(sampling.top_k, dim=-1)
        scaled = torch.full_like(scaled, float("-inf")).scatter(-1, ids, kept)
    probs = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(mass_before >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, ids, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, rng: torch.Generator) -> Tensor:
    """One token for each row: probabilities [N, V] -> int64 [N]. `rng` lives on the same device as `probs`."""
    return torch.multinomial(probs, 1, generator=rng).squeeze(-1)
