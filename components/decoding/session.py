"""Caches that outlive a prompt, so that allocation is never part of a measured generation.

A session belongs to one target and decodes one sequence at a time. It starts every prompt from an empty cache: nothing
leaks from one prompt into the next, which is what makes the order of prompts free.
"""

from __future__ import annotations

import torch

from components.contract import UserError
from components.targets.model import AbstractCache, AbstractTarget


def check_positions(target: AbstractTarget, num_tokens: int) -> None:
    """Raises UserError when the target has no positions for so many tokens, the prompt's and the new ones.

    Guesses need none of their own: where positions run out, a round makes fewer. So a drafter is served what plain
    decoding is served, and refused what it is refused.
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
        """`capacity`: tokens to make room for now; it grows when a prompt needs more."""
        self.target = target
        self._cache = target.new_cache(1, capacity)

    def empty_cache(self, num_tokens: int, scratch_rows: int = 0) -> AbstractCache:
        """The cache with nothing in it and room for at least `num_tokens`, those of the prompt and the new ones.

        scratch_rows: room for rows of one pass beside them: guesses, a tree's or a window's, that are not kept.

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
