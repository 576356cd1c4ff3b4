"""Where the time of a round goes: a clock that counts its own readings shows that nothing is lost or counted twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.bench.clock import Stopwatch
from components.bench.end_to_end.arms import PLAIN, Arm, tree_shape
from components.bench.measurement.slices import ArmRun, Generation, take_turns, wrap_timed
from components.bench.prompts import open_drafter
from components.contract import Context, Draft, Target
from components.decoding.batch import batch_rounds
from components.decoding.chain import Clock, Decoded, Rounds, decode_rounds
from components.drafts import train_draft
from components.targets.interface import AbstractTarget

CHAIN = Arm("eagle3", "e", 3)


def phases_of(
    opened: AbstractTarget, proposer: Any, texts: list[list[int]], arm: Arm, num_tokens: int, shape: Any = None
) -> ArmRun:
    """One generation (a batch where there are several texts, or a tree) of which every time is a number of readings."""
    ticks = itertools.count()
    target, timed_proposer, probe = wrap_timed(opened, proposer, Stopwatch(lambda: next(ticks), list), shape)
    asked: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
    how: dict[str, Any] = {"depth": arm.depth} if shape is None else {"shape": shape}

    def make(own: Clock) -> Rounds[list[Decoded]]:
        if len(texts) > 1 or shape is not None:
            return (yield from batch_rounds(target, timed_proposer, texts, clock=own, **how, **asked))
        return [(yield from decode_rounds(target, timed_proposer, texts[0], clock=own, **how, **asked))]

    generation = Generation(make, probe, lambda: next(ticks))
    with torch.inference_mode():
        take_turns([generation], 8, random.Random(0))
    assert generation.result is not None
    return ArmRun(arm, generation.result, generation.slices, generation.prefill_ns)


def columns(run: ArmRun) -> tuple[list[int], list[int], list[int]]:
    """(round, target, draft) times of all rounds."""
    parts = [(one.round_ns, one.target_ns, one.draft_ns) for one in run.slices]
    rounds, targets, drafts = (list(itertools.chain(*column)) for column in zip(*parts, strict=True))
    return rounds, targets, drafts


def test_the_phases_of_a_round_are_told_apart(opened: AbstractTarget, drafts: list[Draft]) -> None:
    """Each call is two readings, hence one tick: a round is begin, propose (2), verify (2), end."""
    run = phases_of(opened, open_drafter(drafts[0], opened), [[5, 6, 7]], CHAIN, 20)
    rounds = len(run.decoded[0].rounds)
    ends = [5] * (rounds - 1) + [6]  # when it stops the loop reads its own clock once
    assert columns(run) == (ends, [1] * rounds, [1] * rounds)
    whole = run.whole_slices()
    assert [ns for one in whole for ns in one.host_ns] == [end - 2 for end in ends[1:]], "all but the first round"
    assert run.first_round == (5, 1, 1)
    plain = phases_of(opened, None, [[5, 6, 7]], PLAIN, 20)
    assert columns(plain) == ([3] * 18 + [4], [1] * 19, [0] * 19)


@pytest.mark.parametrize("tree", [False, True])
def test_rounds_of_a_batch_that_has_shrunk_are_no_rounds_of_that_batch(
    tree: bool, opened: AbstractTarget, drafts: list[Draft]
) -> None:
    texts = [[5, 6, 7], [9], [30, 31, 2, 8, 40]]
    shape = tree_shape(3, 5) if tree else None
    run = phases_of(opened, open_drafter(drafts[0], opened), texts, CHAIN, 20, shape)
    lengths = [len(one.rounds) for one in run.decoded]
    assert min(lengths) < max(lengths), "all were done at once: nothing is left out"
    assert sum(len(one.round_ns) for one in run.slices) == max(lengths)
    whole = run.whole_slices()
    assert sum(len(one.round_ns) for one in whole) == min(lengths) - 1, "the first round is left out too"
    for one in whole:
        assert min(*one.target_ns, *one.draft_ns) >= 1 and min(one.host_ns) >= 0


def test_a_batch_that_drafts_one_by_one_has_all_its_proposals_in_the_round(
    opened: AbstractTarget, drafts: list[Draft]
) -> None:
    """Near the context's end each sequence has room for another number of guesses, and none are made together."""
    texts = [[5, 6] * 94, [9, 8] * 90]
    run = phases_of(opened, open_drafter(drafts[0], opened), texts, Arm("eagle3", "e", 4), 4)
    assert [one.rounds[0].drafted for one in run.decoded] == [3, 4], "of 192 positions 188 and 180 are taken"
    _, target_ns, draft_ns = columns(run)
    assert set(target_ns) == {1} and draft_ns[0] == 2


def test_lookahead_without_room_for_its_window_has_rounds_without_a_proposal(
    opened: AbstractTarget, target: Target, context: Callable[[str], Context]
) -> None:
    made = train_draft(target, method="lookahead", settings={"lookahead": {"window": 3}}, ctx=context("draft"))
    drafter = open_drafter(made, opened)
    run = phases_of(opened, drafter, [[5, 6, 7] * 56], Arm("lookahead", "l", 2), 24)
    _, target_ns, draft_ns = columns(run)
    assert set(target_ns) == {1} and draft_ns == sorted(draft_ns, reverse=True) and set(draft_ns) == {0, 1}


@pytest.mark.parametrize("method", ["ngram", "lookahead"])
def test_rounds_of_a_method_without_weights_are_taken_apart(
    method: str, target: Target, opened: AbstractTarget, context: Callable[[str], Context]
) -> None:
    settings: dict[str, Any] = {"lookahead": {"window": 3, "pool_from_text": True}}
    made = train_draft(target, method=method, settings=settings, ctx=context("draft"))  # type: ignore[arg-type]
    run = phases_of(opened, open_drafter(made, opened), [[5, 6, 7]], Arm(method, "u", 2), 20)
    rounds = len(run.decoded[0].rounds)
    assert columns(run)[1:] == ([1] * rounds, [1] * rounds)
