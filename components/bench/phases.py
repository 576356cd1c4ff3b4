"""Where the time of a round goes, read off the real decoding loop.

The loop runs as it always does, over a target and a drafter that note when each call began and ended; what lies between
the calls is the loop itself. Phases timed one by one in a tight loop flatter: there every pass finds its own weights in
the processor's cache, while in a round drafter and target take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from components.bench.clock import Stopwatch
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.session import Session
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


class PhaseTimes(NamedTuple):
    """Nanoseconds of each repetition of each phase of one generation. Prefill stands apart from decoding."""

    target: list[int]  # target passes: one row each in plain decoding, depth + 1 rows in a round
    draft: list[int]  # proposals, intake of the columns committed by the round before included
    host: list[int]  # the rest of a round: picking tokens, comparing, bookkeeping
    prefill: int  # the target's pass over the prompt
    draft_prefill: int | None  # the drafter takes the prompt in and makes its first proposal; None without drafter
    num_tokens: int  # kept, of all sequences


def time_phases(
    target: AbstractTarget,
    proposer: Proposer | None,
    contexts: Sequence[Sequence[int]],
    *,
    depth: int,
    num_tokens: int,
    session: Session,
    watch: Stopwatch,
    shape: TreeShape | None = None,
) -> PhaseTimes:
    """Decode `num_tokens` greedily after each context, side by side, and take the rounds apart.

    End-of-text is ignored. session: for a single sequence that is decoded as a chain. shape: guesses branch like this.
    Only rounds of the whole batch count: sequences that are done leave it.
    """
    timed_target = TimedTarget(target, watch)
    timed_proposer = None if proposer is None or depth == 0 else _timed(proposer, timed_target, watch, shape)
    guessing = cast("Proposer | None", timed_proposer)  # `method` is a class variable of what it wraps
    asked: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
    if len(contexts) == 1 and shape is None:
        runs = [decode(timed_target, guessing, contexts[0], depth=depth, session=session, **asked)]
    else:
        chain = {"depth": depth} if shape is None else {"shape": shape}
        runs = decode_batch(timed_target, guessing, contexts, **chain, **asked)
    whole = sum(size == len(contexts) for size in timed_target.batch_sizes)  # the prefill, then rounds
    drafts = [] if timed_proposer is None else timed_proposer.spans[: whole - 1]
    return taken_apart(timed_target.spans[:whole], drafts, watch, sum(len(run.tokens) for run in runs))


def _timed(proposer: Proposer, target: TimedTarget, watch: Stopwatch, shape: TreeShape | None) -> TimedProposer:
    """The proposer, timed the way it is asked: for chains, or for trees of a shape."""
    if shape is None:
        return TimedProposer(proposer, watch)
    assert isinstance(proposer, TreeProposer), f"the guesses of {proposer.method} do not branch"
    timed = TimedTreeProposer(proposer, watch)
    target.about_to = timed.grown
    return timed


def taken_apart(passes: list[Span], drafts: list[Span], watch: Stopwatch, num_tokens: int) -> PhaseTimes:
    """The phases of one generation from the spans of its calls; the first pass is the prefill."""
    numbers = watch.read([moment for span in (*passes, *drafts) for moment in span])
    spans = list(zip(numbers[::2], numbers[1::2], strict=True))
    (prefill, *checks), proposals = spans[: len(passes)], spans[len(passes) :]
    return PhaseTimes(
        target=[end - begin for begin, end in checks],
        draft=[end - begin for begin, end in proposals[1:]],  # the first takes the whole prompt in
        host=_between(checks, proposals),
        prefill=prefill[1] - prefill[0],
        draft_prefill=proposals[0][1] - proposals[0][0] if proposals else None,
        num_tokens=num_tokens,
    )


def _between(passes: list[tuple[int, int]], drafts: list[tuple[int, int]]) -> list[int]:
    """Time between calls, round by round; the last round has no successor to end it."""
    if not drafts:
        return [later[0] - earlier[1] for earlier, later in itertools.pairwise(passes)]
    return [
        (check[0] - draft[1]) + (following[0] - check[1])
        for draft, check, following in zip(drafts, passes, drafts[1:], strict=False)
    ]
