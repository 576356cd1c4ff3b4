"""A drafter that is right often but not always: the target itself, which has forgotten the first token of the prompt.

It branches as a tree proposer must, over a cache of its own, and keeps its guesses out of its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from components.drafts.interface import Branches, CommittedPositions, Proposal, Sampling
from components.drafts.network.sampling import Ancestry, DraftSampler
from components.targets.interface import AbstractCache, AbstractTarget, TreeRows

SPARE_ROWS = 64


@dataclass
class TwinState:
    cache: AbstractCache
    begun: bool = False


class Twin:
    """A Proposer and a TreeProposer."""

    method: ClassVar[str] = "twin"
    needs_features: ClassVar[bool] = False
    max_depth = 8

    def __init__(self, target: AbstractTarget) -> None:
        self.target = target
        self.num_steps = self.max_depth
        self.draft_ids = torch.arange(target.shape.vocab_size)

    def new_state(self, capacity: int) -> TwinState:
        return TwinState(self.target.new_cache(1, capacity + SPARE_ROWS))

    def take_in(self, state: TwinState, columns: CommittedPositions) -> Tensor:
        """Logits [1, V] of the first guess."""
        tokens = columns.next_tokens
        if not state.begun:
            tokens, state.begun = torch.cat((torch.zeros(1, dtype=torch.int64), tokens)), True
        logits = self.target.forward(tokens[None], state.cache, logits="last").logits
        assert logits is not None
        return logits[0]

    def begin(self, state: TwinState, columns: CommittedPositions, depth: int) -> TwinBranches:
        return TwinBranches(self.target, state.cache, self.take_in(state, columns)[0])

    def propose(
        self, state: TwinState, columns: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        guesses = DraftSampler(self.draft_ids, self.target.shape.vocab_size, sampling, [rng])
        logits = self.take_in(state, columns)
        committed = state.cache.lengths.clone()
        for _ in range(depth):
            token = guesses.sample(logits)
            passed = self.target.forward(token[None], state.cache).logits
            assert passed is not None
            logits = passed[0]
        state.cache.truncate(committed)
        return guesses.proposals()[0]


class TwinBranches(Branches):
    """All nodes are run again at every level: slow and plain."""

    def __init__(self, target: AbstractTarget, cache: AbstractCache, root: Tensor) -> None:
        self.target, self.cache, self.root = target, cache, root
        self.ancestry = Ancestry()
        self.tokens = torch.empty(0, dtype=torch.int64)

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        self.ancestry.add(parents)
        self.tokens = torch.cat((self.tokens, tokens))
        depths = torch.tensor([self.ancestry.depths]) - 1
        committed = self.cache.lengths.clone()
        tree = TreeRows(depths, self.ancestry.visible()[None])
        logits = self.target.forward(self.tokens[None], self.cache, tree=tree).logits
        assert logits is not None
        self.cache.truncate(committed)
        return logits[0, -len(parents) :]


class ColumnTwin(Twin):
    """The twin, asked after every column."""

    def draft_logits_after_each(self, state: TwinState, columns: CommittedPositions) -> Tensor:
        tokens = columns.next_tokens
        if not state.begun:
            tokens = torch.cat((torch.zeros(1, dtype=torch.int64), tokens))
        logits = self.target.forward(tokens[None], state.cache).logits
        assert logits is not None
        first, state.begun = int(not state.begun), True
        return logits[0, first:]

    def rollback(self, state: TwinState, count: int) -> None:
        state.cache.truncate(state.cache.lengths - count)
