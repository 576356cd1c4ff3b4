"""Replaying acceptance maps: tokens are conserved, counts are consistent, and a slow reference agrees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.rows import AcceptanceMap, PredictionKey
from components.speedup.prediction.replay import CONTEXT_BINS, acceptance_by_context, count, replay

maps = st.lists(st.integers(0, 8), min_size=1, max_size=60)
depths = st.integers(0, 8)


@given(maps, depths)
def test_rounds_emit_every_token_after_the_first_exactly_once(accepted: list[int], depth: int) -> None:
    rounds = replay(accepted, depth)
    position = 0
    for r in rounds:
        assert r.out_pos == position
        assert 1 <= r.emitted <= r.accepted + 1 <= depth + 1
        position += r.emitted
    assert position == len(accepted)
    assert not any(r.is_cut for r in rounds[:-1])


@given(maps, depths)
def test_replay_equals_walking_token_by_token(accepted: list[int], depth: int) -> None:
    """The reference keeps one flag a token: does a round start when this token is the newest?"""
    starts, budget = [], 0
    for i, kept in enumerate(accepted):
        if budget == 0:
            starts.append(i)
            budget = min(kept, depth) + 1
        budget -= 1
    assert [r.out_pos for r in replay(accepted, depth)] == starts


@given(maps)
def test_depth_zero_is_one_token_a_round(accepted: list[int]) -> None:
    assert [r.emitted for r in replay(accepted, 0)] == [1] * len(accepted)


@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(0, 7))
def test_rounds_never_grow_with_depth_when_guesses_are_consistent(right: list[bool], depth: int) -> None:
    """A token that is guessed right or wrong whatever the round gives maps in which AL is monotone."""
    accepted = []
    for i in range(len(right)):
        run = 0
        while i + run < len(right) and right[i + run]:
            run += 1
        accepted.append(min(run, 8))
    assert len(replay(accepted, depth + 1)) <= len(replay(accepted, depth))


def test_a_deeper_draft_can_need_more_rounds() -> None:
    """Why a falling AL is a flag and not an assertion: depth 3 lands just before a stretch that cannot be guessed."""
    accepted = [3, 0, 0, 2, 0, 0]
    assert len(replay(accepted, 2)) == 2
    assert len(replay(accepted, 3)) == 3


@given(maps, st.integers(1, 8))
def test_positions_telescope(accepted: list[int], depth: int) -> None:
    """The kept drafts of position i are the reached ones of position i + 1, and together they are all kept drafts."""
    c = count(accepted, depth)
    assert c.num_reached[0] == c.full_rounds
    assert c.num_reached[1:] == c.num_kept[:-1]
    assert sum(c.num_kept) == c.full_accepted
    assert c.tokens == len(accepted)
    assert c.rounds - c.full_rounds in (0, 1)


def test_positions_past_the_end_of_the_answer_are_not_rounds() -> None:
    assert [r.out_pos for r in replay([1, 1, 1, 1, 1], 1, num_tokens=4)] == [0, 2]
    assert [r.emitted for r in replay([1, 1, 1, 1, 1], 1, num_tokens=4)] == [2, 1]


@given(st.lists(st.tuples(maps, st.none() | st.integers(1, 40_000)), min_size=1, max_size=6), st.integers(1, 8))
def test_context_lengths_share_out_the_rounds_of_every_answer(
    answers: list[tuple[list[int], int | None]], depth: int
) -> None:
    """The reference places each round by hand; answers of prompts of unknown length have no place."""
    key = ("s", "t", "d", "eagle3")
    rows = [
        AcceptanceMap("t", "d", "eagle3", f"{n}", "w", 8, 8, len(a) + 1, a, a, 0.0, "float32", prompt_tokens=length)
        for n, (a, length) in enumerate(answers)
    ]
    binned = acceptance_by_context(rows, [0, depth], PredictionKey(*key, "all", 1), 20, seed=0)
    placed = [
        (sum(length + r.out_pos > end for end in CONTEXT_BINS), n, r.emitted)
        for n, (a, length) in enumerate(answers)
        if length is not None
        for r in replay(a, depth)
    ]
    assert [row.context_from for row in binned] == [
        (0, *CONTEXT_BINS)[place] for place in sorted({p[0] for p in placed})
    ]
    for row in binned:
        inside = [p for p in placed if (0, *CONTEXT_BINS)[p[0]] == row.context_from]
        assert (row.num_rounds, row.num_tokens) == (len(inside), sum(p[2] for p in inside))
        assert row.num_prompts == len({p[1] for p in inside}) and row.depth_k == depth
        assert row.al == row.num_tokens / row.num_rounds and row.al_lo <= row.al <= row.al_hi
