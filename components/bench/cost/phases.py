"""Times the phases of a round inside the real decoding loop.

The loop runs unchanged over a target and a drafter that record when each call began and ended; the rest is the loop
itself. Phases timed one by one in a tight loop are too fast: there every pass finds its weights in the processor's
cache, while in a round drafter and target alternate.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from components.bench.clock import Stopwatch
from components.bench.measurement.slices import Passes
from components.decoding.tree_shapes import TreeShape
from components.drafts.interface import (
    BatchProposer,
    Branches,
    CommittedPositions,
    Proposal,
    Proposer,
    Sampling,
    TreeProposer,
)
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows

Span = tuple[Any, Any]  # the stopwatch's marks at the begin and end of a call


class TimedTarget(AbstractTarget):
    """A target that records the span of every forward pass and delegates everything else."""

    def __init__(self, target: AbstractTarget, watch: Stopwatch) -> None:
        self.inner, self.mark = target, watch.mark
        self.shape, self.device, self.dtype, self.kernel = target.shape, target.device, target.dtype, target.kernel
        self.spans: list[Span] = []
        self.batch_sizes: list[int] = []  # of every pass
        self.about_to: Callable[[Any], None] | None = None  # called with the begin of every pass

    def new_cache(self, batch_size: int, capacity: int) -> AbstractCache:
        return self.inner.new_cache(batch_size, capacity)

    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        """Run and time one pass."""
        begin = self.mark()
        out = self.inner.forward(ids, cache, num_valid=num_valid, logits=logits, features=features, tree=tree)
        self.spans.append((begin, self.mark()))
        self.batch_sizes.append(ids.shape[0])
        if self.about_to is not None:
            self.about_to(begin)
        return out

    def final_norm(self, last: Tensor) -> Tensor:
        return self.inner.final_norm(last)

    def unembed(self, normed: Tensor) -> Tensor:
        return self.inner.unembed(normed)

    @property
    def embedding(self) -> Tensor:
        return self.inner.embedding


class TimedProposer:
    """A proposer that records the span of every proposal, for one sequence or for a batch."""

    def __init__(self, proposer: Proposer, watch: Stopwatch) -> None:
        self.inner, self.mark = proposer, watch.mark
        self.method, self.max_depth = proposer.method, proposer.max_depth
        self.needs_features = proposer.needs_features
        self.spans: list[Span] = []

    def new_state(self, capacity: int) -> Any:
        return self.inner.new_state(capacity)

    def propose(
        self, state: Any, columns: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """Make and time one proposal."""
        begin = self.mark()
        proposal = self.inner.propose(state, columns, depth, sampling, rng)
        self.spans.append((begin, self.mark()))
        return proposal

    def propose_batch(
        self,
        states: Sequence[Any],
        columns: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """Make the proposals of a batch, timed as one; one by one if the method cannot batch."""
        begin = self.mark()
        if isinstance(self.inner, BatchProposer):
            proposals = self.inner.propose_batch(states, columns, depth, sampling, rngs)
        else:
            each = zip(states, columns, rngs, strict=True)
            proposals = [self.inner.propose(state, new, depth, sampling, rng) for state, new, rng in each]
        self.spans.append((begin, self.mark()))
        return proposals


class TimedTreeProposer(TimedProposer):
    """A proposer of trees: a proposal lasts from the first `begin` of a round to the pass that verifies it.

    In between the tree grows: calls of the drafter, and the decoder's choice of nodes.
    """

    def __init__(self, proposer: TreeProposer, watch: Stopwatch) -> None:
        super().__init__(proposer, watch)  # type: ignore[arg-type]  # a TreeProposer has all of Proposer
        self.draft_ids = proposer.draft_ids
        self._tree, self._begin_mark = proposer, None

    def begin(self, state: Any, columns: CommittedPositions, depth: int) -> Branches:
        """Delegate; the first call of a round starts its proposal."""
        if self._begin_mark is None:
            self._begin_mark = self.mark()
        return self._tree.begin(state, columns, depth)

    def end_proposal(self, moment: Any) -> None:
        """End the proposal at `moment`, when the verifying pass begins."""
        if self._begin_mark is not None:
            self.spans.append((self._begin_mark, moment))
            self._begin_mark = None


class PhaseProbe:
    """Reads the phases of one generation's rounds from the spans that its target and proposer recorded."""

    def __init__(self, target: TimedTarget, proposer: TimedProposer | None, watch: Stopwatch) -> None:
        self.target, self.proposer, self.watch = target, proposer, watch

    def take(self) -> Passes:
        """The passes since the last call, each with the time of the proposals since the pass before.

        It is 0 for a pass without a proposal (lookahead has no room for one near the end of the context).
        """
        passes, sizes = self.target.spans, self.target.batch_sizes
        drafts = [] if self.proposer is None else self.proposer.spans
        self.target.spans, self.target.batch_sizes = [], []
        if self.proposer is not None:
            self.proposer.spans = []
        numbers = self.watch.read([moment for span in (*passes, *drafts) for moment in span])
        spans = list(zip(numbers[::2], numbers[1::2], strict=True))
        begins, draft_ns = [begin for begin, _ in spans[: len(passes)]], [0] * len(passes)
        for begin, end in spans[len(passes) :]:
            draft_ns[bisect.bisect_left(begins, end)] += end - begin
        return Passes([end - begin for begin, end in spans[: len(passes)]], draft_ns, sizes)


def wrap_timed(
    target: AbstractTarget, proposer: Proposer | None, watch: Stopwatch, shape: TreeShape | None = None
) -> tuple[AbstractTarget, Proposer | None, PhaseProbe]:
    """Target and proposer that record their calls, and the probe that reads them. shape: of trees, None for chains."""
    timed_target = TimedTarget(target, watch)
    if proposer is None:
        return timed_target, None, PhaseProbe(timed_target, None, watch)
    if shape is None:
        timed_proposer = TimedProposer(proposer, watch)
    else:
        assert isinstance(proposer, TreeProposer), f"the guesses of {proposer.method} do not branch"
        timed_proposer = TimedTreeProposer(proposer, watch)
        timed_target.about_to = timed_proposer.end_proposal
    # `method` is a class variable of what it wraps
    return timed_target, cast("Proposer", timed_proposer), PhaseProbe(timed_target, timed_proposer, watch)
