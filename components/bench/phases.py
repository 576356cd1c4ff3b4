"""Where the time of a round goes, read off the real decoding loop.

The loop runs as it always does, over a target and a drafter that note when each call began and ended; what lies between
the calls is the loop itself. Phases timed one by one in a tight loop flatter: there every pass finds its own weights in
the processor's cache, while in a round drafter and target take turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from components.decoding.chain import Decoded, decode
from components.decoding.session import Session
from components.drafts.draft import Columns, Proposal, Proposer, Sampling
from components.targets.model import AbstractCache, AbstractTarget, TargetPass

Span = tuple[int, int]  # begin and end of a call, ns


class TimedTarget(AbstractTarget):
    """A target that notes the span of every forward pass; everything else is passed on."""

    def __init__(self, target: AbstractTarget, clock: Callable[[], int]) -> None:
        self.inner, self.clock = target, clock
        self.shape, self.device, self.dtype, self.kernel = target.shape, target.device, target.dtype, target.kernel
        self.spans: list[Span] = []

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
    ) -> TargetPass:
        """One pass, timed."""
        begin = self.clock()
        out = self.inner.forward(ids, cache, num_valid=num_valid, logits=logits, features=features)
        self.spans.append((begin, self.clock()))
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
    """A proposer that notes the span of every proposal."""

    def __init__(self, proposer: Proposer, clock: Callable[[], int]) -> None:
        self.inner, self.clock = proposer, clock
        self.method, self.max_depth = proposer.method, proposer.max_depth
        self.needs_features = proposer.needs_features
        self.spans: list[Span] = []

    def new_state(self, capacity: int) -> Any:
        """Passed on."""
        return self.inner.new_state(capacity)

    def propose(self, state: Any, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator) -> Proposal:
        """One proposal, timed."""
        begin = self.clock()
        proposal = self.inner.propose(state, columns, depth, sampling, rng)
        self.spans.append((begin, self.clock()))
        return proposal


class PhaseTimes(NamedTuple):
    """Nanoseconds of each repetition of each phase of one generation, without the prefill and the prompt's intake."""

    target: list[int]  # target passes: one row each in plain decoding, depth + 1 rows in a round
    draft: list[int]  # proposals, intake of the columns committed by the round before included
    host: list[int]  # the rest of a round: picking tokens, comparing, bookkeeping
    decoded: Decoded


def time_phases(
    target: AbstractTarget,
    proposer: Proposer | None,
    context: Sequence[int],
    *,
    depth: int,
    num_tokens: int,
    session: Session,
    clock: Callable[[], int],
) -> PhaseTimes:
    """Decode `num_tokens` greedily after `context` and take the round apart. End-of-text is ignored."""
    timed_target = TimedTarget(target, clock)
    timed_proposer = None if proposer is None or depth == 0 else TimedProposer(proposer, clock)
    decoded = decode(
        timed_target,
        timed_proposer,  # type: ignore[arg-type]  # `method` is a class variable of what it wraps
        context,
        max_new_tokens=num_tokens,
        depth=depth,
        ignore_eos=True,
        session=session,
    )
    passes = timed_target.spans[1:]  # without the prefill
    drafts = [] if timed_proposer is None else timed_proposer.spans
    return PhaseTimes(
        target=[end - begin for begin, end in passes],
        draft=[end - begin for begin, end in drafts[1:]],  # the first takes the whole prompt in
        host=_between(passes, drafts),
        decoded=decoded,
    )


def _between(passes: list[Span], drafts: list[Span]) -> list[int]:
    """Time between calls, round by round; the last round has no successor to end it."""
    if not drafts:
        return [later[0] - earlier[1] for earlier, later in itertools.pairwise(passes)]
    return [
        (check[0] - draft[1]) + (following[0] - check[1])
        for draft, check, following in zip(drafts, passes, drafts[1:], strict=False)
    ]
