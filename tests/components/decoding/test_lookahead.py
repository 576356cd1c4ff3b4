"""Lookahead decoding says what plain greedy decoding says, and its window computes what its definition says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.contract import UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.session import Session
from components.decoding.verification import BlockRule
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.lookahead import UNKNOWN, Lookahead
from components.drafts.settings import LookaheadSettings
from components.targets.interface import AbstractTarget

LENGTH = 40
PROMPTS = ([5, 9, 2, 7], [3], [11, 4, 4, 8, 30, 2, 6, 19, 25])
NOTHING = torch.empty(0)


def lookahead(target: AbstractTarget, **chosen: Any) -> Lookahead:
    return Lookahead(target, LookaheadSettings(**chosen))


def plain(target: AbstractTarget, prompt: Sequence[int], length: int = LENGTH) -> list[int]:
    return decode(target, None, prompt, max_new_tokens=length, ignore_eos=True).tokens


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    window=st.integers(1, 6),
    size=st.integers(2, 5),
    guesses=st.integers(1, 5),
    pooled=st.booleans(),
    prompt=st.sampled_from(PROMPTS),
    data=st.data(),
)
def test_output_is_that_of_plain_greedy_decoding(
    target: AbstractTarget, window: int, size: int, guesses: int, pooled: bool, prompt: list[int], data: st.DataObject
) -> None:
    depth = data.draw(st.integers(1, size - 1))
    proposer = lookahead(target, window=window, ngram_size=size, max_guesses=guesses, pool_from_text=pooled)
    run = decode(target, proposer, prompt, max_new_tokens=LENGTH, depth=depth, ignore_eos=True)
    assert run.tokens == plain(target, prompt)
    assert 1 + sum(r.emitted for r in run.rounds) == LENGTH
    assert all(r.accepted <= depth and r.emitted == r.accepted + 1 for r in run.rounds[:-1])
    assert all(r.drafted <= guesses * depth and r.drafted % depth == 0 for r in run.rounds)
    assert [r.kv_len for r in run.rounds] == [len(prompt) + r.out_pos for r in run.rounds]


def test_text_that_repeats_is_accepted_whole_once_the_pool_knows_it(target: AbstractTarget) -> None:
    """The tiny target soon repeats itself; then every pass keeps N-1 guesses."""
    answer = plain(target, PROMPTS[0], 150)
    assert len(set(answer[-24:])) < 24, "the target of this test no longer falls into a loop"
    proposer = lookahead(target, window=8, ngram_size=4, pool_from_text=True)
    run = decode(target, proposer, PROMPTS[0], max_new_tokens=150, depth=3, ignore_eos=True)
    assert run.tokens == answer
    assert max(r.accepted for r in run.rounds) == 3
    assert len(run.rounds) < 140


def test_the_window_finds_guesses_without_any_text_to_copy(target: AbstractTarget) -> None:
    accepted = 0
    for prompt in PROMPTS:
        run = decode(target, lookahead(target, window=8), prompt, max_new_tokens=100, depth=3, ignore_eos=True)
        assert run.tokens == plain(target, prompt, 100)
        accepted += sum(r.accepted for r in run.rounds)
    assert accepted > 0


def test_end_of_text_ends_it(target: AbstractTarget) -> None:
    answer = plain(target, PROMPTS[0])
    end = answer[13]
    run = decode(
        target, lookahead(target, pool_from_text=True), PROMPTS[0], max_new_tokens=LENGTH, depth=3, eos_ids=[end]
    )
    assert run.tokens == answer[: answer.index(end) + 1]
    assert run.status == "eos"


def test_a_pass_computes_the_window_of_the_definition(target: AbstractTarget) -> None:
    """W = 3, N = 4: each row's output is that of a plain pass over exactly the rows it sees, in order of position."""
    proposer = lookahead(target, window=3, ngram_size=4, max_guesses=2)
    state = proposer.new_state(32)
    state.levels = [[UNKNOWN, 21, 22], [10, 11, 12], [13, 14, 15]]
    for gram in ([7, 1, 2, 3], [7, 4, 5, 6]):
        state.add_to_pool(gram)
    prompt = [5, 9, 2]
    proposer.propose(
        state, CommittedPositions(torch.tensor([9, 2, 7]), NOTHING, NOTHING), 3, Sampling(), torch.Generator()
    )
    plan = state.plan
    assert plan is not None
    assert plan.tokens == [7, 21, 22, 10, 11, 12, 13, 14, 15, 4, 5, 6, 1, 2, 3]
    seen = {
        0: [7], 1: [7, 21], 2: [7, 21, 22],
        3: [7, 10], 4: [7, 21, 11], 5: [7, 21, 22, 12],
        6: [7, 10, 13], 7: [7, 21, 11, 14], 8: [7, 21, 22, 12, 15],
        9: [7, 4], 10: [7, 4, 5], 11: [7, 4, 5, 6], 12: [7, 1], 13: [7, 1, 2], 14: [7, 1, 2, 3],
    }  # fmt: skip
    cache = target.new_cache(1, 64)
    target.forward(torch.tensor([prompt]), cache)
    out = target.forward(torch.tensor([plan.tokens]), cache, tree=plan.tree).logits
    assert out is not None
    for row, path in seen.items():
        assert [plan.tokens[i] for i in plan.tree.visible[0, row].nonzero()[:, 0]] == path
        assert plan.tree.depths[0, row] == len(path) - 1
        fresh = target.new_cache(1, 64)
        alone = target.forward(torch.tensor([[*prompt, *path]]), fresh, logits="last").logits
        assert alone is not None
        torch.testing.assert_close(out[0, row], alone[0, 0], atol=1e-4, rtol=1e-4)


def test_closed_ngrams_enter_the_pool_and_the_window_slides_over_accepted_tokens(target: AbstractTarget) -> None:
    state = lookahead(target, window=3, ngram_size=3, max_guesses=2).new_state(32)
    state.levels = [[7, 8, UNKNOWN], [1, 2, 3]]
    state.advance([0, 0, 0, 4, 5, 6], num_accepted=1)
    assert state.pool == {7: {(1, 4): None}, 8: {(2, 5): None}}
    assert state.levels == [[2, 3, UNKNOWN], [5, 6, UNKNOWN]]
    for rest in ((1, 1), (1, 4), (9, 9)):
        state.add_to_pool([7, *rest])
    assert list(state.pool[7]) == [(1, 4), (9, 9)]


def test_what_lookahead_cannot_do_is_refused_in_one_line(target: AbstractTarget) -> None:
    proposer = lookahead(target)
    with pytest.raises(UserError, match="lookahead is greedy only: set temperature 0"):
        decode(target, proposer, [1], max_new_tokens=4, depth=2, sampling=Sampling(1.0), rng=torch.Generator())
    with pytest.raises(UserError, match="depth 4 is outside what lookahead can draft"):
        decode(target, proposer, [1], max_new_tokens=4, depth=4)
    with pytest.raises(UserError, match="lookahead decodes one sequence at a time"):
        decode_batch(target, proposer, [[1], [2]], max_new_tokens=4, depth=2)


def test_drafting_everywhere_is_a_run_that_accepts_nothing(target: AbstractTarget) -> None:
    """Each row is the n-gram that held longest there; on the target's own text it says how many tokens were right."""
    prompt, answer = PROMPTS[2], plain(target, PROMPTS[2], 80)
    ids = torch.tensor([*prompt, *answer])
    proposer = lookahead(target, window=8, pool_from_text=True)
    guesses = proposer.propose_at_every_position(ids, NOTHING, NOTHING, 3).tokens
    assert guesses.shape == (len(ids) - 1, 3)
    right = (guesses[: len(ids) - 4] == ids[2:].unfold(0, 3, 1)[: len(ids) - 4]).long().cumprod(1).sum(1)
    assert right[len(prompt) :].sum() > 0
    assert torch.equal(guesses, proposer.propose_at_every_position(ids, NOTHING, NOTHING, 3).tokens)


def test_a_session_is_reused_and_leaks_nothing(target: AbstractTarget) -> None:
    session = Session(target, capacity=16)
    for prompt in (*PROMPTS, *PROMPTS):
        run = decode(
            target, lookahead(target), prompt, max_new_tokens=LENGTH, depth=3, ignore_eos=True, session=session
        )
        assert run.tokens == plain(target, prompt)


def test_rows_that_share_positions_need_none_of_their_own(target: AbstractTarget) -> None:
    longest = target.shape.max_position_embeddings
    wide = lookahead(target, window=8, ngram_size=4, max_guesses=8)
    prompt = [(7 * i) % 30 + 1 for i in range(longest - 30)]  # its 48 rows a pass fit no position, its 12 deepest do
    found = decode(target, wide, prompt, max_new_tokens=12, depth=3, ignore_eos=True)
    assert found.tokens == plain(target, prompt, 12)


def test_a_block_rule_is_refused_where_the_loop_knows_none(target: AbstractTarget) -> None:
    with pytest.raises(UserError, match="no block rule"):
        decode(target, lookahead(target), [3, 4], max_new_tokens=4, depth=2, rule=BlockRule("top_k", 2))
