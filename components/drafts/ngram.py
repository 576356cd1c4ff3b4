"""Prompt lookup: draft by copying what followed the same words before (Saxena 2023; no training, no weights).

The longest suffix of up to `max_ngram` tokens that occurred earlier in prompt and output gives the guess: the tokens
that followed its most recent occurrence. An index from every n-gram to the place after it makes a look-up O(1) instead
of a scan of the history. When the copy runs into its own end it goes on copying its guesses, which follows a loop of
any length; that is the strongest form of this baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

import torch

from components.drafts.draft import Columns, Proposal, Sampling


@dataclass
class NgramState:
    """ids: x_1, x_2, ... as plain integers. after: n-gram -> index in `ids` of what followed it last."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


@final
class Ngram:
    """A Proposer without a network; `max_ngram` down to 1 tokens must match."""

    method: ClassVar[str] = "ngram"
    needs_features: ClassVar[bool] = False

    def __init__(self, max_ngram: int = 3, max_depth: int = 16) -> None:
        self.max_ngram, self.max_depth, self.num_steps = max_ngram, max_depth, max_depth

    def new_state(self, capacity: int) -> NgramState:
        """State for one sequence; it grows as it must."""
        return NgramState()

    def propose(
        self, state: NgramState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer. Deterministic at every temperature, hence no probabilities; nothing found: no tokens."""
        ids = state.ids
        for token in columns.next_tokens.tolist():
            ids.append(token)
            place = len(ids) - 1  # every n-gram that ends just before this token is now followed by it
            for size in range(1, min(self.max_ngram, place) + 1):
                state.after[tuple(ids[place - size : place])] = place
        tokens = self._copy(state, min(depth, self.max_depth))
        return Proposal(torch.tensor(tokens, dtype=torch.int64, device=columns.next_tokens.device), None)

    def _copy(self, state: NgramState, depth: int) -> list[int]:
        ids = state.ids
        for size in range(min(self.max_ngram, len(ids)), 0, -1):
            place = state.after.get(tuple(ids[-size:]))
            if place is not None:
                copied: list[int] = []
                for i in range(place, place + depth):
                    copied.append(ids[i] if i < len(ids) else copied[i - len(ids)])
                return copied
        return []
