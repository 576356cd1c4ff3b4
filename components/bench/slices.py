"""Generations that take turns on one machine, a few tens of milliseconds each, so that all meet the same moments.

Every way of decoding (an arm) continues the same prompt. In one cycle each of them, in random order, goes on until it
has said the same next tokens of the text: the same work, at the same context length, within the same tenth of a second.
A machine that slows down for a second slows all arms down alike; whole generations one after the other would give the
slow second to one of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol

from components.decoding.chain import Clock, Result, Rounds


class Slice(NamedTuple):
    """One turn of one generation: the cycle it belongs to, and nanoseconds round by round.

    target_ns, draft_ns: the pass and the proposal of each round (draft_ns is 0 where nothing drafts); what is left of
    round_ns is the loop's own. num_sequences: of the batch that each round's pass held.
    """

    cycle: int
    round_ns: list[int]
    target_ns: list[int]
    draft_ns: list[int]
    num_sequences: list[int]


class Passes(NamedTuple):
    """The phases of some rounds; see Slice."""

    target_ns: list[int]
    draft_ns: list[int]
    num_sequences: list[int]


class Probe(Protocol):
    """Tells what the rounds since it was last asked were made of."""

    def take(self) -> Passes:
        """The rounds since; the first call tells of the prefill alone."""


class StandingClock:
    """A clock that tells nanoseconds and stands still while others have their turn."""

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self._clock, self._stood, self._since = clock, 0, clock()

    def __call__(self) -> int:
        """Nanoseconds of its own turns so far, after an arbitrary origin; asked within a turn."""
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

    make: begins it, given the clock that it is to read its times from. probe: knows the phases of its rounds. clock:
    waits for the device first where work is asynchronous.
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
        self._own = StandingClock(self.clock)
        self._rounds = self.make(self._own)

    @property
    def is_done(self) -> bool:
        """Whether it has said all it says."""
        return self.result is not None

    def prefill(self) -> None:
        """Take the prompt in."""
        self._own.go()
        begin = self.clock()
        self._next()
        self.prefill_ns = self.clock() - begin
        self._own.stop()
        self.probe.take()

    def turn(self, cycle: int, num_tokens: int) -> None:
        """Go on, round by round, until it has said `num_tokens` tokens in all, or the end."""
        times: list[int] = []
        self._own.go()
        while not self.is_done and self.num_kept < num_tokens:
            begin = self.clock()
            self._next()
            times.append(self.clock() - begin)
        self._own.stop()
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
    """Decode all of them to their ends; see the head of this file."""
    for generation in order.sample(generations, len(generations)):
        generation.prefill()
    cycle = 0
    while live := [generation for generation in generations if not generation.is_done]:
        cycle += 1
        for generation in order.sample(live, len(live)):
            generation.turn(cycle, 1 + cycle * tokens_a_slice)
