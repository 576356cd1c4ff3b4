"""Prompt lookup: draft by copying the tokens that followed the same words before (Saxena 2023; no weights).

The longest suffix of `max_ngram` down to `min_ngram` tokens that occurred earlier in prompt and output gives the draft:
the tokens that followed its most recent occurrence (the first public code takes the earliest one; text nearby resembles
the present more). An index from every n-gram to the place after it makes a look-up O(1) instead of a scan of the
history. When the copy reaches the end of the text it continues with its own draft tokens, which follows a loop of any
length; that is the strongest form of this baseline.

A Proposer never sees x_0, so the history begins with x_1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from components.contract import Target
from components.drafts.interface import CommittedPositions, EveryPosition, Proposal, Sampling, UntrainedRecord
from components.drafts.settings import NgramSettings
from components.targets.interface import AbstractTarget

MEASURED_DEPTH = 7  # as deep as EAGLE-3 is trained by default
NO_TOKEN = -1
DEFAULTS = NgramSettings()


@dataclass
class NgramState:
    """ids: x_1, x_2, ... as plain integers. after: n-gram -> index in `ids` of the token that followed it last."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class FromSettings:
    """A drafter that is made of its settings alone: no weights, no draft vocabulary, nothing of the target."""

    num_steps: int
    max_depth: int

    def __init__(self, settings: Any) -> None:
        """settings: the method's own class."""

    @classmethod
    def build(cls, target: AbstractTarget, settings: Any, draft_ids: Tensor) -> Self:
        """As AbstractDraft.build."""
        return cls(settings)

    @classmethod
    def untrained_record(cls, target: Target, settings: Any) -> UntrainedRecord:
        """Its entries of draft.json."""
        built = cls(settings)
        return UntrainedRecord(settings, built.num_steps, built.max_depth, 0)


@final
class Ngram(FromSettings):
    """A Drafter without a network; `max_ngram` down to `min_ngram` tokens must match."""

    method: ClassVar[str] = "ngram"
    needs_features: ClassVar[bool] = False

    def __init__(self, settings: NgramSettings = DEFAULTS, max_depth: int = 16) -> None:
        self.max_ngram, self.min_ngram, self.max_depth = settings.max_ngram, settings.min_ngram, max_depth
        self.num_steps, self.kernel = min(MEASURED_DEPTH, max_depth), "plain"

    def new_state(self, capacity: int) -> NgramState:
        """State for one sequence; it grows as it must."""
        return NgramState()

    def propose(
        self, state: NgramState, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """As Proposer: deterministic at every temperature, hence no probabilities; no tokens without a match."""
        for token in committed.next_tokens.tolist():
            self._commit(state, token)
        tokens = self._copy(state, min(depth, self.max_depth))
        return Proposal(torch.tensor(tokens, dtype=torch.int64, device=committed.next_tokens.device), None)

    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As Drafter: `propose` after each column; taps and last are not read."""
        state, rows = NgramState(), []
        for token in ids[1:].tolist():
            self._commit(state, token)
            copied = self._copy(state, depth)
            rows.append(copied + [NO_TOKEN] * (depth - len(copied)))
        return EveryPosition(torch.tensor(rows[first:], dtype=torch.int64, device=ids.device).view(-1, depth), None)

    def _commit(self, state: NgramState, token: int) -> None:
        ids = state.ids
        ids.append(token)
        index = len(ids) - 1  # every n-gram that ends just before this token is now followed by it
        for size in range(self.min_ngram, min(self.max_ngram, index) + 1):
            state.after[tuple(ids[index - size : index])] = index

    def _copy(self, state: NgramState, depth: int) -> list[int]:
        ids = state.ids
        for size in range(min(self.max_ngram, len(ids)), self.min_ngram - 1, -1):
            start = state.after.get(tuple(ids[-size:]))
            if start is not None:
                copied: list[int] = []
                for i in range(start, start + depth):
                    copied.append(ids[i] if i < len(ids) else copied[i - len(ids)])
                return copied
        return []
