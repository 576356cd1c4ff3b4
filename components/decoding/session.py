"""What a generation is run with: a cache that outlives the prompt, and how tokens are drawn.

Allocation must not be part of a measured generation. A session belongs to one target and decodes one sequence at a
time. Every prompt starts from an empty cache, so that results do not depend on the order of prompts.

Tokens are drawn by one generator on the CPU, so that a seed means the same tokens on every device. The distribution
itself (temperature, top-k, top-p) is `drafts.network.sampling.probabilities`, which target and drafter share:
cut only one of them and tokens that the cut target can never say are proposed and paid for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.contract import UserError
from components.drafts.interface import Sampling
from components.targets.interface import AbstractCache, AbstractTarget


def check_positions(target: AbstractTarget, num_tokens: int) -> None:
    """Raises UserError when the target has no positions for so many tokens, the prompt's and the new ones.

    Draft tokens need no positions beyond these: where positions run out, a round drafts fewer. So speculative decoding
    accepts exactly the requests of plain decoding.
    """
    longest = target.shape.max_position_embeddings
    if num_tokens > longest:
        raise UserError(
            f"decoding: prompt and new tokens need {num_tokens} positions, the target has {longest}: shorten the "
            "prompt or max_new_tokens"
        )


class Session:
    """One target and its reusable cache of a single sequence."""

    def __init__(self, target: AbstractTarget, capacity: int = 256) -> None:
        """`capacity`: tokens to allocate now; the cache grows when a prompt needs more."""
        self.target = target
        self._cache = target.new_cache(1, capacity)

    def empty_cache(self, num_tokens: int, scratch_rows: int = 0) -> AbstractCache:
        """The emptied cache, with room for at least `num_tokens` (prompt and new tokens).

        scratch_rows: extra room for rows of one pass that are not committed: draft tokens, or a lookahead window.

        Raises UserError when the target has no positions for that many tokens.
        """
        check_positions(self.target, num_tokens)
        longest = self.target.shape.max_position_embeddings
        needed = num_tokens + scratch_rows
        if needed > self._cache.capacity:
            # Doubling: a run over growing prompts allocates a handful of times.
            self._cache = self.target.new_cache(1, min(longest + scratch_rows, max(needed, 2 * self._cache.capacity)))
        self._cache.truncate(torch.zeros(1, dtype=torch.int64))
        return self._cache


def is_greedy(sampling: Sampling) -> bool:
    """Temperature 0 means the argmax, without any draw."""
    return sampling.temperature <= 0.0


def draw(probs: Tensor, rng: torch.Generator) -> Tensor:
    """One token for each row: probabilities [N, V] -> int64 [N] on the same device; `rng` lives on the CPU."""
    return torch.multinomial(probs.cpu(), 1, generator=rng).squeeze(-1).to(probs.device)


def draw_uniform(count: int, device: torch.device, rng: torch.Generator) -> Tensor:
    """`count` numbers in [0, 1), float32 [count]."""
    return torch.rand(count, generator=rng).to(device)
