"""Generations that take turns of some tens of milliseconds, so that disturbances affect all of them alike.

Every way of decoding (an arm) continues the same prompt. In one cycle each of them, in random order, decodes the same
next tokens of the text: the same work, at the same context length, within the same tenth of a second. A machine that
slows down for a second then slows all arms alike; with whole generations in sequence, it would slow one of them.
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

    target_ns, draft_ns: the pass and the proposal of each round (draft_ns is 0 without drafting); the rest of round_ns
    is the loop's own. num_sequences: in the batch of each round's pass.
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
