"""Generations that take turns say what they say alone, do the same work in every cycle, and time only themselves."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_runs import arm_run

from components.bench.clock import stopwatch_for
from components.bench.end_to_end.arms import PLAIN, tree_shape
from components.bench.measurement.slices import (
    MAX_SLICE_TOKENS,
    SLICE_NS,
    ArmRun,
    Generation,
    Passes,
    StandingClock,
    slice_length,
    take_turns,
    wrap_timed,
)
from components.bench.prompts import open_drafter
from components.contract import Draft
from components.decoding.batch import batch_rounds, decode_batch
from components.decoding.chain import Clock, Decoded, Rounds, decode, decode_rounds
from components.decoding.session import Session
from components.drafts.methods.lookahead import Lookahead
from components.drafts.methods.ngram import Ngram
from components.drafts.settings import LookaheadSettings
from components.targets.interface import AbstractTarget

PROMPT = [4, 9, 30, 4, 9]
BATCH = [[4, 9, 30, 4, 9], [7], [12, 3, 3, 40, 8, 2, 5]]
LENGTH = 40


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 50)), max_size=30))
def test_a_clock_stands_still_while_others_have_their_turn(turns: list[tuple[int, int, int]]) -> None:
    now = [1000]
    clocks = [StandingClock(lambda: now[0]) for _ in range(3)]
    stood_at: dict[int, int] = {}
    for who, own, idle in turns:
        clocks[who].go()
        begun = clocks[who]()
        assert begun == stood_at.get(who, begun), "it went on while it had no turn"
        now[0] += own
        assert clocks[who]() == begun + own
        clocks[who].stop()
        stood_at[who] = begun + own
        now[0] += idle


class MadeUp:
    """A generation of rounds that take and keep what they are told to, on a clock that only they move."""

    def __init__(self, number: int, rounds: list[tuple[int, int]], now: list[int], log: list[tuple[int, int]]) -> None:
        self.number, self.rounds, self.now, self.log, self.untold = number, rounds, now, log, 0

    def make(self, own: Clock) -> Rounds[int]:
        begun = own()
        self.now[0] += 5
        kept, self.untold = 1, 1
        for ns, emitted in self.rounds:
            yield kept
            self.log.append((self.number, kept))
            self.now[0] += ns
            kept += emitted
            self.untold += 1
        return own() - begun

    def take(self) -> Passes:
        count, self.untold = self.untold, 0
        return Passes([1] * count, [0] * count, [1] * count)


rounds_made_up = st.lists(st.tuples(st.integers(1, 100), st.integers(1, 4)), max_size=12)


@given(st.lists(rounds_made_up, min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 3))
def test_in_a_cycle_all_reach_the_same_token_and_each_times_itself_alone(
    arms: list[list[tuple[int, int]]], tokens_a_slice: int, seed: int
) -> None:
    now, log = [0], list[tuple[int, int]]()
    made = [MadeUp(number, rounds, now, log) for number, rounds in enumerate(arms)]
    generations = [Generation(one.make, one, lambda: now[0]) for one in made]
    take_turns(generations, tokens_a_slice, random.Random(seed))
    for rounds, generation in zip(arms, generations, strict=True):
        assert generation.result == 5 + sum(ns for ns, _ in rounds), "the time of others is in it"
        assert generation.prefill_ns == 5
        assert [ns for one in generation.slices for ns in one.round_ns] == [ns for ns, _ in rounds]
        kept = 1
        left = iter(rounds)
        for one in generation.slices:
            for _ in one.round_ns:
                assert kept < 1 + one.cycle * tokens_a_slice, "a round too many for its cycle"
                kept += next(left)[1]
            assert kept >= 1 + one.cycle * tokens_a_slice or one is generation.slices[-1]
    # A round of a later cycle never comes before one of an earlier cycle, whoever's it is.
    first_token = [max(0, kept - 1) // tokens_a_slice for _, kept in log]
    assert first_token == sorted(first_token)


def test_who_goes_first_is_not_always_the_same() -> None:
    now, log = [0], list[tuple[int, int]]()
    made = [MadeUp(number, [(1, 1)] * 8, now, log) for number in range(3)]
    take_turns([Generation(one.make, one, lambda: now[0]) for one in made], 1, random.Random(0))
    assert len({tuple(who for who, _ in log[at : at + 3]) for at in range(0, len(log), 3)}) > 2


Make = Callable[[AbstractTarget, Any, Clock], Rounds[list[Decoded]]]


def ways(opened: AbstractTarget, drafts: list[Draft]) -> dict[str, tuple[Any, Make, list[Decoded], Any]]:
    """Name -> (proposer, what continues PROMPT or BATCH round by round, what is said alone, tree or None)."""
    eagle, mtp = (open_drafter(draft, opened) for draft in drafts)
    tree = tree_shape(4, 6)
    asked: dict[str, Any] = {"max_new_tokens": LENGTH, "ignore_eos": True}

    def chain(proposer: Any, depth: int) -> tuple[Any, Make, list[Decoded], Any]:
        def make(target: AbstractTarget, timed_proposer: Any, own: Clock) -> Rounds[list[Decoded]]:
            one = yield from decode_rounds(
                target, timed_proposer, PROMPT, depth=depth, session=Session(opened), clock=own, **asked
            )
            return [one]

        return proposer, make, [decode(opened, proposer, PROMPT, depth=depth, **asked)], None

    def together(proposer: Any, how: dict[str, Any]) -> tuple[Any, Make, list[Decoded], Any]:
        def make(target: AbstractTarget, timed_proposer: Any, own: Clock) -> Rounds[list[Decoded]]:
            return batch_rounds(target, timed_proposer, BATCH, clock=own, **how, **asked)

        return proposer, make, decode_batch(opened, proposer, BATCH, **how, **asked), how.get("shape")

    return {
        "plain": chain(None, 0),
        "eagle3": chain(eagle, 3),
        "mtp": chain(mtp, 2),
        "ngram": chain(Ngram(), 4),
        "lookahead": chain(Lookahead(opened, LookaheadSettings(window=3, pool_from_text=True)), 2),
        "plain batch": together(None, {}),
        "eagle3 batch": together(eagle, {"depth": 3}),
        "eagle3 trees": together(eagle, {"shape": tree}),
    }


@pytest.mark.parametrize(("tokens_a_slice", "seed"), [(1, 0), (5, 1), (16, 2), (64, 3)])
def test_taking_turns_changes_no_token_and_no_round(
    tokens_a_slice: int, seed: int, opened: AbstractTarget, drafts: list[Draft]
) -> None:
    """All ways of decoding at once, in any order of turns; and the phases of each round fit into it."""
    watch = stopwatch_for(opened.device)
    expected, generations = dict[str, list[Decoded]](), dict[str, Generation[list[Decoded]]]()
    for name, (proposer, make, alone, shape) in ways(opened, drafts).items():
        target, timed_proposer, probe = wrap_timed(opened, proposer, watch, shape)
        expected[name] = alone
        generations[name] = Generation(functools.partial(make, target, timed_proposer), probe)
    with torch.inference_mode():
        take_turns(list(generations.values()), tokens_a_slice, random.Random(seed))
    for name, generation in generations.items():
        assert generation.result is not None
        for ours, theirs in zip(generation.result, expected[name], strict=True):
            said = (ours.tokens, ours.tokens_raw, ours.rounds, ours.status)
            assert said == (theirs.tokens, theirs.tokens_raw, theirs.rounds, theirs.status), name
        num_rounds = max(len(one.rounds) for one in expected[name])
        assert sum(len(one.round_ns) for one in generation.slices) == num_rounds, name
        live = [sum(len(one.rounds) > number for one in expected[name]) for number in range(num_rounds)]
        assert [size for one in generation.slices for size in one.num_sequences] == live, name
        for one in generation.slices:
            for round_ns, target_ns, draft_ns, _ in zip(*one[1:], strict=True):
                assert target_ns > 0 and target_ns + draft_ns <= round_ns, name
                assert (draft_ns == 0) == (name in ("plain", "plain batch")), name
        assert 0 < generation.result[0].ttft_ns <= generation.prefill_ns, name


def test_nothing_to_say_after_the_first_token_needs_no_turn(opened: AbstractTarget) -> None:
    target, _, probe = wrap_timed(opened, None, stopwatch_for(opened.device))
    short = Generation(lambda own: decode_rounds(target, None, PROMPT, max_new_tokens=1, clock=own), probe)
    with torch.inference_mode():
        take_turns([short], 4, random.Random(0))
    assert short.result is not None and len(short.result.tokens) == 1 and short.slices == []


def test_a_slice_is_of_some_tens_of_milliseconds() -> None:
    def plain(round_ns: float) -> ArmRun:
        return arm_run(PLAIN, [[round(round_ns)] * 12])

    assert slice_length(plain(SLICE_NS / 5)) == 5
    assert slice_length(plain(SLICE_NS * 10)) == 1 and slice_length(plain(1000)) == MAX_SLICE_TOKENS
    assert slice_length(plain(1000)._replace(slices=[])) == 1, "nothing was said: the shortest"
