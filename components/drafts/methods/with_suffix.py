"""Suffix decoding beside a trained drafter: where the text repeats a copy drafts, elsewhere the trained drafter.

After Arctic Inference, which sets suffix decoding beside a trained drafter in vLLM: the copy drafts in a round where
its score, the expected number of right tokens (suffix.py), reaches `min_score`, which stands for what the trained
drafter is expected to get right. The choice depends on committed tokens alone, never on what the trained drafter would
say, so its passes are saved where a copy drafts, and sampling keeps the target's distribution: a copy is a
deterministic proposal, a draft of the trained drafter comes with the distribution it was drawn from.

Positions that are committed while copies draft wait, and are handed to the trained drafter together when it drafts
again. Its chains end at a depth of their own, copies at the depth that is asked for. Chains only: a copy has no
branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from components.drafts.interface import (
    AbstractDraft,
    BatchProposer,
    CommittedPositions,
    EveryPosition,
    Proposal,
    Sampling,
)
from components.drafts.methods.batched import merged
from components.drafts.methods.ngram import NO_TOKEN
from components.drafts.methods.suffix import Suffix, SuffixState
from components.targets.shape import TapLayers


@dataclass
class WithSuffixState:
    """One sequence. waiting: committed positions, in order, that the trained drafter has not been given yet."""

    suffix: SuffixState
    drafter: Any
    waiting: list[CommittedPositions] = field(default_factory=list)


@final
class WithSuffix:
    """A Drafter of a trained one's method. depth: the most tokens of the trained drafter's chains."""

    def __init__(self, drafter: AbstractDraft, suffix: Suffix, depth: int) -> None:
        assert depth <= drafter.max_depth, "the trained drafter cannot draft this deep"
        self.drafter, self.suffix, self.depth = drafter, suffix, depth
        self.method, self.kernel, self.num_steps = drafter.method, drafter.kernel, drafter.num_steps
        self.max_depth = max(depth, suffix.max_depth)
        self._batched = drafter if isinstance(drafter, BatchProposer) else None

    @property
    def needs_features(self) -> bool | TapLayers:
        """As Proposer."""
        return self.drafter.needs_features

    def remember(self, answers: Iterable[Sequence[int]]) -> None:
        """As CopiesAnswers."""
        self.suffix.remember(answers)

    def new_state(self, capacity: int) -> WithSuffixState:
        """State for one sequence of at most `capacity` tokens."""
        return WithSuffixState(self.suffix.new_state(capacity), self.drafter.new_state(capacity))

    def propose(
        self,
        state: WithSuffixState,
        committed: CommittedPositions,
        depth: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> Proposal:
        """As Proposer: a batch of one."""
        return self.propose_batch([state], [committed], depth, sampling, [rng])[0]

    def propose_batch(
        self,
        states: Sequence[WithSuffixState],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer: the trained drafter is called once, for the sequences without a copy."""
        proposals, others = list[Proposal | None](), list[int]()
        for index, (state, new) in enumerate(zip(states, committed, strict=True)):
            self.suffix.commit(state.suffix, new.next_tokens.tolist())
            state.waiting.append(new)
            if copied := self.suffix.best_copy(state.suffix).tokens[:depth]:
                tokens = torch.tensor(copied, dtype=torch.int64, device=new.next_tokens.device)
                proposals.append(Proposal(tokens, None))
            else:
                proposals.append(None)
                others.append(index)
        if others:
            drafted = iter(
                self._draft([states[i] for i in others], min(depth, self.depth), sampling, [rngs[i] for i in others])
            )
            return [next(drafted) if proposal is None else proposal for proposal in proposals]
        return [proposal for proposal in proposals if proposal is not None]

    def _draft(
        self, states: Sequence[WithSuffixState], depth: int, sampling: Sampling, rngs: Sequence[torch.Generator]
    ) -> list[Proposal]:
        """Chains of the trained drafter, which is given what has waited."""
        own, committed = [state.drafter for state in states], [merged(state.waiting) for state in states]
        for state in states:
            state.waiting = []
        if self._batched is not None:
            return self._batched.propose_batch(own, committed, depth, sampling, rngs)
        return [
            self.drafter.propose(state, new, depth, sampling, rng)
            for state, new, rng in zip(own, committed, rngs, strict=True)
        ]

    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As Drafter: the trained drafter's chains, and copies where one drafts; copies have no confidence."""
        drafted = self.drafter.propose_at_every_position(ids, taps, last, min(depth, self.depth), first).tokens
        rows = torch.nn.functional.pad(drafted, (0, depth - drafted.shape[1]), value=NO_TOKEN)
        state = self.suffix.new_state(len(ids))
        for row, token in enumerate(ids[1:].tolist(), start=-first):
            self.suffix.commit(state, [token])
            if row >= 0 and (copied := self.suffix.best_copy(state).tokens[:depth]):
                rows[row] = torch.tensor(copied + [NO_TOKEN] * (depth - len(copied)), device=rows.device)
        return EveryPosition(rows, None)
