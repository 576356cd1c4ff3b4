"""The arm "loaded, off": a drafter that keeps its state at every token, so that it could draft, but proposes nothing.

An engine does this for a request without speculation while a drafter is in memory: the target computes the features,
the drafter gets every committed column and updates its state, and each round verifies no draft token. The cost of the
update differs: a drafter with one cache (the EAGLE family, a draft model) runs a pass over the column; mtp and
mtp-parallel only store it, and pay when drafting resumes; prompt lookup adds it to its index; medusa keeps nothing. The
arm's speed against plain decoding, with nothing loaded, is the overhead of enabled speculation (vLLM #49548 saw 7 to
22 %), and includes that update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from components.drafts.draft import BatchProposer, CommittedPositions, Proposal, Proposer, Sampling


def make_idle(proposer: Proposer) -> Proposer:
    """The same drafter, loaded but off."""
    return cast(Proposer, IdleDrafter(proposer))


class IdleDrafter:
    """A Proposer that updates the state of another one and proposes nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self.inner, self.needs_features = proposer, proposer.needs_features
        self.method = f"{proposer.method} off"  # decoded by the ordinary loop, even if the method has its own
        self.max_depth = self.num_steps = 1  # the loop asks for one token a round and gets none

    def new_state(self, capacity: int) -> Any:
        """The wrapped drafter's own state."""
        return self.inner.new_state(capacity)

    def propose(
        self, state: Any, columns: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """Update the state with the columns; propose nothing."""
        return self.inner.propose(state, columns, 0, sampling, rng)

    def propose_batch(
        self,
        states: Sequence[Any],
        columns: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As `propose`, for every sequence."""
        if isinstance(self.inner, BatchProposer):
            return self.inner.propose_batch(states, columns, 0, sampling, rngs)
        each = zip(states, columns, rngs, strict=True)
        return [self.inner.propose(state, new, 0, sampling, rng) for state, new, rng in each]
