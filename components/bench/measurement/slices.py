"""Generations that take turns of some tens of milliseconds, with the phases of every round.

Every way of decoding (an arm) continues the same prompt. In one cycle each of them, in random order, decodes the same
next tokens of the text: the same work, at the same context length, within the same tenth of a second. A machine that
slows down for a second then slows all arms alike; with whole generations in sequence, it would slow one of them.

Phases are timed inside the real decoding loop, which runs unchanged over a target and a drafter that record when each
call began and ended (`wrap_timed`); the rest is the loop itself. Phases timed one by one in a tight loop are too fast:
there every pass finds its weights in the processor's cache, while in a round drafter and target alternate.
"""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from components.bench.clock import Stopwatch
from components.bench.end_to_end.arms import Arm
from components.decoding.batch import propose_each
from components.decoding.chain import Clock, Decoded, Result, Rounds
from components.decoding.tree_shapes import TreeShape
from components.definitions import steady
from components.drafts.interface import (
    Branches,
    CommittedPositions,
    Proposal,
    Proposer,
    Sampling,
    TreeProposer,
)
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows, WrappedTarget
from components.targets.shape import TapLayers

SLICE_NS: Final = 40e6
"""Time of plain decoding in one slice: long against the cache misses after a change of arms, short against the seconds
for which other work disturbs."""


MAX_SLICE_TOKENS: Final = 16
"""Most tokens of a slice."""


class Slice(NamedTuple):
    """One turn of one generation: the cycle it belongs to, and nanoseconds round by round.

    target_ns, draft_ns: the pass and the proposal of each round (draft_ns is 0 without drafting); the rest of round_ns
    is the loop's own. num_sequences: in the batch of each round's pass.
    """

    cycle: int
    round_ns: list[int]
    target_ns: list[int]
    draft_ns: list[int]
    num_sequences: list[int]


class WholeSlice(NamedTuple):
    """Rounds of one slice, in nanoseconds: each round, its pass of the target, its proposal.

    drafted: tokens that were drafted in each round, over the whole batch.
    """

    round_ns: list[int]
    target_ns: list[int]
    draft_ns: list[int]
    drafted: list[int]

    @property
    def host_ns(self) -> list[int]:
        """The rest of each round: the decoding loop itself."""
        return [a - b - c for a, b, c in zip(*self[:3], strict=True)]


class ArmRun(NamedTuple):
    """One arm's generations, decoded as a batch, and its turns."""

    arm: Arm
    decoded: list[Decoded]
    slices: list[Slice]
    prefill_ns: int

    def whole_slices(self) -> list[WholeSlice]:
        """The rounds in which the whole batch took part, slice by slice, without the generation's first round.

        The first round's proposal processes the whole prompt; a finished sequence leaves the batch.
        """
        whole_slices, first_number = [], 0
        for turn in self.slices:
            rounds = list(enumerate(zip(*turn[1:], strict=True), start=first_number))
            first_number += len(rounds)
            whole = [
                (ns, target, draft, sum(decoded.rounds[number].drafted for decoded in self.decoded))
                for number, (ns, target, draft, size) in rounds
                if number and size == len(self.decoded)
            ]
            if whole:
                whole_slices.append(WholeSlice(*(list(column) for column in zip(*whole, strict=True))))
        return whole_slices

    @property
    def first_round(self) -> tuple[int, int, int]:
        """(round, target, draft) ns of the first round."""
        first = self.slices[0]
        return first.round_ns[0], first.target_ns[0], first.draft_ns[0]


def slice_length(plain: ArmRun) -> int:
    """Tokens of a slice, so that plain decoding takes about SLICE_NS."""
    rounds = [ns for rounds_of_slice in plain.whole_slices() for ns in rounds_of_slice.round_ns]
    return max(1, min(MAX_SLICE_TOKENS, round(SLICE_NS / steady(rounds)))) if rounds else 1


def seconds_a_token(runs: Sequence[ArmRun]) -> float:
    """Seconds for one token in all of these arms together, undisturbed or not: an estimate for notes."""
    return sum(sum(sum(turn.round_ns) for turn in run.slices) / len(run.decoded[0].tokens) for run in runs) / 1e9


class Passes(NamedTuple):
    """The phases of some rounds; see Slice."""

    target_ns: list[int]
    draft_ns: list[int]
    num_sequences: list[int]


class Probe(Protocol):
    """Gives the phases of the rounds since its last call."""

    def take(self) -> Passes:
        """The rounds since the last call; the first call gives the prefill alone."""


class StandingClock:
    """A nanosecond clock that stands still between the turns of its generation."""

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self._clock, self._stood, self._since = clock, 0, clock()

    def __call__(self) -> int:
        """Nanoseconds of its own turns so far, from an arbitrary origin; call it within a turn."""
        return self._clock() - self._stood

    def stop(self) -> None:
        """A turn ends."""
        self._since = self._clock()

    def go(self) -> None:
        """A turn begins."""
        self._stood += self._clock() - self._since


@dataclass
class Generation(Generic[Result]):
    """A generation that waits for its turns.

    make: starts it, with the clock for its times. probe: gives the phases of its rounds. clock: waits for the device
    first where work is asynchronous.
    """

    make: Callable[[Clock], Rounds[Result]]
    probe: Probe
    clock: Clock = time.perf_counter_ns
    prefill_ns: int = 0
    num_kept: int = 0
    slices: list[Slice] = field(default_factory=list)
    result: Result | None = None

    def __post_init__(self) -> None:
        """Prepare; nothing is decoded yet."""
        self._turn_clock = StandingClock(self.clock)
        self._rounds = self.make(self._turn_clock)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.result is not None

    def prefill(self) -> None:
        """Process the prompt."""
        self._turn_clock.go()
        begin = self.clock()
        self._next()
        self.prefill_ns = self.clock() - begin
        self._turn_clock.stop()
        self.probe.take()

    def turn(self, cycle: int, num_tokens: int) -> None:
        """Decode round by round until it has `num_tokens` tokens in all, or ends."""
        times: list[int] = []
        self._turn_clock.go()
        while not self.is_done and self.num_kept < num_tokens:
            begin = self.clock()
            self._next()
            times.append(self.clock() - begin)
        self._turn_clock.stop()
        if times:
            passes = self.probe.take()
            assert len(passes.target_ns) == len(times), "a round is one pass of the target"
            self.slices.append(Slice(cycle, times, *passes))

    def _next(self) -> None:
        try:
            self.num_kept = next(self._rounds)
        except StopIteration as end:
            self.result = end.value


def take_turns(generations: Sequence[Generation[Result]], tokens_a_slice: int, order: random.Random) -> None:
    """Decode all of them to their ends, in turns of `tokens_a_slice` tokens."""
    for generation in order.sample(generations, len(generations)):
        generation.prefill()
    cycle = 0
    while live := [generation for generation in generations if not generation.is_done]:
        cycle += 1
        for generation in order.sample(live, len(live)):
            generation.turn(cycle, 1 + cycle * tokens_a_slice)


Span = tuple[Any, Any]  # the stopwatch's marks at the begin and end of a call


class TimedTarget(WrappedTarget):
    """A target that records the span of every forward pass and leaves the rest to the one it wraps."""

    def __init__(self, target: AbstractTarget, watch: Stopwatch) -> None:
        super().__init__(target)
        self.mark = watch.mark
        self.spans: list[Span] = []
        self.batch_sizes: list[int] = []  # of every pass
        self.about_to: Callable[[Any], None] | None = None  # called with the begin of every pass

    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool | TapLayers = False,
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
        proposals = propose_each(self.inner, states, columns, [depth] * len(states), sampling, rngs)
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
