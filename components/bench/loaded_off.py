"""A drafter that is loaded and could go on at any token, but is asked for nothing: the arm "loaded, off".

It is what an engine does with a request that wants no speculation while a drafter is in memory: the target computes the
features, the drafter gets every committed column and keeps what it needs to draft later, and each round verifies no
guess at all. What it keeps differs: a drafter with one cache (the EAGLE family, a draft model) takes the column in by a
pass of its own; mtp and mtp-parallel only remember it, and their modules pay when drafting resumes; prompt lookup
enters it into its index; medusa keeps nothing. So the arm's speed against plain decoding, the tax of having speculation
switched on (vLLM #49548 saw 7 to 22 % of it), holds that work for the first and not for the others. Plain decoding,
with nothing loaded, stays the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from components.drafts.draft import BatchProposer, Columns, Proposal, Proposer, Sampling


def kept_off(proposer: Proposer) -> Proposer:
    """The same drafter, loaded but off."""
    return cast(Proposer, LoadedOff(proposer))


class LoadedOff:
    """A Proposer over another one that keeps its state and proposes nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self.inner, self.needs_features = proposer, proposer.needs_features
        self.method = f"{proposer.method} off"  # decoded by the ordinary loop, whatever loop the method has of its own
        self.max_depth = self.num_steps = 1  # the decoding loop is asked for one guess a round and gets none

    def new_state(self, capacity: int) -> Any:
        """The wrapped drafter's own state."""
        return self.inner.new_state(capacity)

    def propose(self, state: Any, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator) -> Proposal:
        """Keep of the columns what drafting later needs; no guess."""
        return self.inner.propose(state, columns, 0, sampling, rng)

    def propose_batch(
        self,
        states: Sequence[Any],
        columns: Sequence[Columns],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """The same for every sequence."""
        if isinstance(self.inner, BatchProposer):
            return self.inner.propose_batch(states, columns, 0, sampling, rngs)
        each = zip(states, columns, rngs, strict=True)
        return [self.inner.propose(state, new, 0, sampling, rng) for state, new, rng in each]
