"""Prompt lookup: draft by copying what followed the same words before (Saxena 2023; no training, no weights).

The longest suffix of `max_ngram` down to `min_ngram` tokens that occurred earlier in prompt and output gives the guess:
the tokens that followed its most recent occurrence (the first public code takes the earliest one; text nearby resembles
the present more). An index from every n-gram to the place after it makes a look-up O(1) instead of a scan of the
history. When the copy runs into its own end it goes on copying its guesses, which follows a loop of any length; that is
the strongest form of this baseline.

A Proposer is never shown x_0, so the history begins with x_1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from components.contract import Target
from components.drafts.draft import Columns, Proposal, Sampling
from components.drafts.settings import NgramSettings

MEASURED_DEPTH = 7  # as deep as EAGLE-3 is trained by default
NO_TOKEN = -1


@dataclass
class NgramState:
    """ids: x_1, x_2, ... as plain integers. after: n-gram -> index in `ids` of what followed it last."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


@final
class Ngram:
    """A Drafter without a network; `max_ngram` down to `min_ngram` tokens must match."""

    method: ClassVar[str] = "ngram"
    needs_features: ClassVar[bool] = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1, max_depth: int = 16) -> None:
        assert 1 <= min_ngram <= max_ngram
        self.max_ngram, self.min_ngram, self.max_depth = max_ngram, min_ngram, max_depth
        self.num_steps, self.kernel = min(MEASURED_DEPTH, max_depth), "plain"

    @classmethod
    def build(cls, target: Any, settings: Mapping[str, Any], draft_ids: Tensor) -> Ngram:
        """As every method is built; neither the target nor a draft vocabulary is needed. settings: NgramSettings."""
        chosen = NgramSettings.model_validate(dict(settings))
        return cls(chosen.max_ngram, chosen.min_ngram)

    @classmethod
    def written_down(cls, target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
        """What draft.json says beside names and sizes: settings, num_steps, max_depth, num_parameters."""
        built = cls.build(None, settings, torch.empty(0))
        depths = {"num_steps": built.num_steps, "max_depth": built.max_depth}
        return {"settings": dict(settings), **depths, "num_parameters": 0}

    def new_state(self, capacity: int) -> NgramState:
        """State for one sequence; it grows as it must."""
        return NgramState()

    def propose(
        self, state: NgramState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer. Deterministic at every temperature, hence no probabilities; nothing found: no tokens."""
        for token in columns.next_tokens.tolist():
            self._commit(state, token)
        tokens = self._copy(state, min(depth, self.max_depth))
        return Proposal(torch.tensor(tokens, dtype=torch.int64, device=columns.next_tokens.device), None)

    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """See Drafter: what `propose` says after each column, int64 [T-1, depth]; taps and last are not read."""
        state, rows = NgramState(), []
        for token in ids[1:].tolist():
            self._commit(state, token)
            copied = self._copy(state, depth)
            rows.append(copied + [NO_TOKEN] * (depth - len(copied)))
        return torch.tensor(rows, dtype=torch.int64, device=ids.device).view(-1, depth)

    def _commit(self, state: NgramState, token: int) -> None:
        ids = state.ids
        ids.append(token)
        place = len(ids) - 1  # every n-gram that ends just before this token is now followed by it
        for size in range(self.min_ngram, min(self.max_ngram, place) + 1):
            state.after[tuple(ids[place - size : place])] = place

    def _copy(self, state: NgramState, depth: int) -> list[int]:
        ids = state.ids
        for size in range(min(self.max_ngram, len(ids)), self.min_ngram - 1, -1):
            place = state.after.get(tuple(ids[-size:]))
            if place is not None:
                copied: list[int] = []
                for i in range(place, place + depth):
                    copied.append(ids[i] if i < len(ids) else copied[i - len(ids)])
                return copied
        return []
