"""Where the time of a round goes, read off the real decoding loop.

The loop runs as it always does, over a target and a drafter that note when each call began and ended; what lies between
the calls is the loop itself. Phases timed one by one in a tight loop flatter: there every pass finds its own weights in
the processor's cache, while in a round drafter and target take turns.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from components.bench.clock import Stopwatch
from components.bench.slices import Passes
from components.decoding.tree_shapes import TreeShape
from components.drafts.draft import BatchProposer, Branches, Columns, Proposal, Proposer, Sampling, TreeProposer
from components.targets.model import AbstractCache, AbstractTarget, TargetPass, TreeRows

Span = tuple[Any, Any]  # moments at which a call began and ended, as the stopwatch marks them


class TimedTarget(AbstractTarget):
    """A target that notes the span of every forward pass; everything else is passed on."""

    def __init__(self, target: AbstractTarget, watch: Stopwatch) -> None:
        self.inner, self.mark = target, watch.mark
        self.shape, self.device, self.dtype, self.kernel = target.shape, target.device, target.dtype, target.kernel
        self.spans: list[Span] = []
        self.batch_sizes: list[int] = []  # of every pass
        self.about_to: Callable[[Any], None] | None = None  # told of the moment at which a pass begins

    def new_cache(self, batch_size: int, capacity: int) -> AbstractCache:
        """Passed on."""
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
        """One pass, timed."""
        begin = self.mark()
        out = self.inner.forward(ids, cache, num_valid=num_valid, logits=logits, features=features, tree=tree)
        self.spans.append((begin, self.mark()))
        self.batch_sizes.append(ids.shape[0])
        if self.about_to is not None:
            self.about_to(begin)
        return out

    def final_norm(self, last: Tensor) -> Tensor:
        """Passed on."""
        return self.inner.final_norm(last)

    def unembed(self, normed: Tensor) -> Tensor:
        """Passed on."""
        return self.inner.unembed(normed)

    @property
    def embedding(self) -> Tensor:
        """Passed on."""
        return self.inner.embedding


class TimedProposer:
    """A proposer that notes the span of every proposal, for one sequence or for a batch."""

    def __init__(self, proposer: Proposer, watch: Stopwatch) -> None:
        self.inner, self.mark = proposer, watch.mark
        self.method, self.max_depth = proposer.method, proposer.max_depth
        self.needs_features = proposer.needs_features
        self.spans: list[Span] = []

    def new_state(self, capacity: int) -> Any:
        """Passed on."""
        return self.inner.new_state(capacity)

    def propose(self, state: Any, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator) -> Proposal:
        """One proposal, timed."""
        begin = self.mark()
        proposal = self.inner.propose(state, columns, depth, sampling, rng)
        self.spans.append((begin, self.mark()))
        return proposal

    def propose_batch(
        self,
        states: Sequence[Any],
        columns: Sequence[Columns],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """The proposals of a whole batch, timed as one; one after the other where the method knows no better."""
        begin = self.mark()
        if isinstance(self.inner, BatchProposer):
            proposals = self.inner.propose_batch(states, columns, depth, sampling, rngs)
        else:
            each = zip(states, columns, rngs, strict=True)
            proposals = [self.inner.propose(state, new, depth, sampling, rng) for state, new, rng in each]
        self.spans.append((begin, self.mark()))
        return proposals


class TimedTreeProposer(TimedProposer):
    """A proposer whose guesses branch: a proposal lasts from the first `begin` of a round to the pass that verifies it.

    What lies between is the tree being grown: calls of the drafter, and the decoder's choice of nodes.
    """

    def __init__(self, proposer: TreeProposer, watch: Stopwatch) -> None:
        super().__init__(proposer, watch)  # type: ignore[arg-type]  # a TreeProposer has all of Proposer
        self.draft_ids = proposer.draft_ids
        self._tree, self._begun = proposer, None

    def begin(self, state: Any, columns: Columns, depth: int) -> Branches:
        """Passed on; the first of a round starts its proposal."""
        if self._begun is None:
            self._begun = self.mark()
        return self._tree.begin(state, columns, depth)

    def grown(self, moment: Any) -> None:
        """A pass begins at this moment: the trees are grown."""
        if self._begun is not None:
            self.spans.append((self._begun, moment))
            self._begun = None


class PhaseProbe:
    """Tells what the rounds of one generation were made of, from the spans that its target and proposer noted."""

    def __init__(self, target: TimedTarget, proposer: TimedProposer | None, watch: Stopwatch) -> None:
        self.target, self.proposer, self.watch = target, proposer, watch

    def take(self) -> Passes:
        """The passes since it was last asked, each with what was proposed between it and the pass before.

        A pass without a proposal (near the end of the context lookahead has no room for one) has 0; see slices.Probe.
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


def timed(
    target: AbstractTarget, proposer: Proposer | None, watch: Stopwatch, shape: TreeShape | None = None
) -> tuple[AbstractTarget, Proposer | None, PhaseProbe]:
    """Target and proposer that note when each call began and ended, and who reads that. shape: guesses branch so."""
    timed_target = TimedTarget(target, watch)
    if proposer is None:
        return timed_target, None, PhaseProbe(timed_target, None, watch)
    if shape is None:
        timed_proposer = TimedProposer(proposer, watch)
    else:
        assert isinstance(proposer, TreeProposer), f"the guesses of {proposer.method} do not branch"
        timed_proposer = TimedTreeProposer(proposer, watch)
        timed_target.about_to = timed_proposer.grown
    # `method` is a class variable of what it wraps
    return timed_target, cast("Proposer", timed_proposer), PhaseProbe(timed_target, timed_proposer, watch)
