"""A random target that a drafter learns in a second, and the same weights in transformers, which keeps no cache.

Thirty-two tokens, seven layers, wide embeddings: its greedy text does not settle into a loop, its distributions are
flat enough to sample from, and much of the next token shows in the last one, so a drafter of one layer gets somewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny_targets import open_in_memory, tiny_llama
from torch import Tensor

from components.drafts.interface import Batch
from components.targets.interface import AbstractTarget

VOCAB_SIZE = 32
PROMPT = [3, 4, 5, 6]


class Learnable(NamedTuple):
    """One set of weights twice: our forward pass, and transformers' own model."""

    target: AbstractTarget
    model: Any


def make_learnable_target() -> Learnable:
    """Both in float32 on the CPU; the same at every call."""
    state = torch.random.get_rng_state()
    model = tiny_llama(
        VOCAB_SIZE,
        lambda name: 15.0 if "embed_tokens" in name or "lm_head" in name else 5.0,
        max_position_embeddings=2048,
    )
    torch.random.set_rng_state(state)
    return Learnable(open_in_memory(model), model)


def columns_of(target: AbstractTarget, ids: Tensor, num_prompt: int) -> Batch:
    """The training batch of texts ids int64 [B, T]; what follows the first num_prompt tokens is answer."""
    out = target.forward(ids, target.new_cache(*ids.shape), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    mask = (torch.arange(ids.shape[1]) >= num_prompt).expand_as(ids)
    return Batch(ids, mask, out.taps.clone(), out.last.clone(), torch.full((len(ids),), ids.shape[1]))
