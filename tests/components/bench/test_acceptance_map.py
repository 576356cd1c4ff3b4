"""A map says what live decoding does, at every depth, for every kind of drafter."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.bench.acceptance import measure_acceptance
from components.bench.acceptance_map import acceptance_map, repeated_bigrams
from components.bench.subjects import encoded_prompts, greedy_answers, kept_length, open_drafter
from components.contract import Context, Draft, Prompts, Target
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.draft import Columns, Sampling
from components.drafts.ngram import Ngram
from components.rows import AcceptanceMap, read_rows
from components.speedup.replay import replay
from components.targets.model import AbstractTarget

LENGTH = 40


@pytest.mark.parametrize("index", [0, 1], ids=["eagle3", "mtp"])
def test_replaying_a_map_is_decoding_live_at_every_depth(
    index: int,
    target: Target,
    opened: AbstractTarget,
    drafts: list[Draft],
    prompts: Prompts,
    context: Callable[[str], Context],
) -> None:
    """Token for token and round for round; end-of-text included, since the tiny target says it now and then."""
    drafter = open_drafter(drafts[index], opened)
    depths = range(1, drafter.max_depth + 1)
    session = Session(opened)
    accepted_somewhere = 0
    for prompt in encoded_prompts(target, opened, prompts, "test", 64, context("prompts")):
        answer = greedy_answers(opened, [prompt.ids], LENGTH + drafter.max_depth, 1)[0]
        kept = kept_length(answer[:LENGTH], opened.shape.eos_token_ids)
        found = acceptance_map(opened, drafter, prompt.ids, answer, kept, drafter.max_depth)
        assert len(found.accepted) == len(found.proxy_accepted) == kept - 1
        for depth in depths:
            run = decode(opened, drafter, prompt.ids, max_new_tokens=LENGTH, depth=depth, session=session)
            assert run.tokens == answer[:kept]
            assert [r[:4] for r in run.rounds] == [tuple(r) for r in replay(found.accepted, depth)]
        accepted_somewhere += sum(found.accepted)
        assert all((proxy > 0) == (a > 0) for a, proxy in zip(found.accepted, found.proxy_accepted, strict=True))
    assert accepted_somewhere > 20, "the drafter is never right: nothing was tested"


def test_the_step_writes_one_bounded_map_a_prompt(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    ctx = context("acceptance")
    made = measure_acceptance(target, drafts[0], prompts, max_new_tokens=24, max_depth=6, ctx=ctx)
    maps = read_rows(ctx.out, AcceptanceMap)
    assert sorted(m.prompt_id for m in maps) == [f"test-{number}" for number in range(5)]
    for m in maps:
        assert (m.k_max, m.trained_depth, m.method) == (6, 4, "eagle3")
        assert len(m.accepted) == len(m.proxy_accepted) == m.num_tokens - 1 <= 23
        assert all(0 <= a <= 6 for a in m.accepted + m.proxy_accepted)
        assert 0.0 <= m.repeated_bigrams < 1.0
    assert made.info["num_prompts"] == 5


def test_maps_are_the_same_in_whatever_order_their_shards_are_made_and_after_a_kill(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    def last_first(function: Callable[..., Any], shards: Sequence[Any]) -> Iterator[Any]:
        return iter([function(copy.deepcopy(shard), float) for shard in reversed(shards)][::-1])

    settings: dict[str, Any] = {"max_new_tokens": 16, "batch_size": 2}
    here, there, killed = context("here"), context("there"), context("killed")
    there.mapper = last_first
    made = [measure_acceptance(target, drafts[1], prompts, **settings, ctx=ctx) for ctx in (here, there)]
    assert (there.out / "acceptance_map.jsonl").read_bytes() == (here.out / "acceptance_map.jsonl").read_bytes()
    assert made[0].info == made[1].info
    shutil.copy(here.scratch / "maps-00001.json", killed.scratch)
    again: list[str] = []
    killed.mapper = lambda function, shards: (again.append(s.file.name) or function(s, float) for s in shards)
    assert measure_acceptance(target, drafts[1], prompts, **settings, ctx=killed).info == made[0].info
    assert again == ["maps-00000.json", "maps-00002.json"]
    assert (killed.out / "acceptance_map.jsonl").read_bytes() == (here.out / "acceptance_map.jsonl").read_bytes()


def test_the_trained_depth_is_the_default(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    ctx = context("acceptance")
    measure_acceptance(target, drafts[1], prompts, max_new_tokens=8, ctx=ctx)
    assert {m.k_max for m in read_rows(ctx.out, AcceptanceMap)} == {2}


@pytest.mark.parametrize(
    ("tokens", "share"), [([], 0.0), ([1], 0.0), ([1, 2, 1, 2], 1 / 3), ([5, 5, 5, 5], 2 / 3), ([1, 2, 3], 0.0)]
)
def test_repeated_bigrams_counts_what_occurred_before(tokens: list[int], share: float) -> None:
    assert repeated_bigrams(tokens) == pytest.approx(share)


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(0, 4))
def test_an_answer_is_kept_up_to_and_including_its_end(tokens: list[int], end: int) -> None:
    kept = tokens[: kept_length(tokens, {end})]
    assert end not in kept[:-1]
    assert kept == tokens or kept[-1] == end


def test_replay_is_exact_for_prompt_lookup_too(
    target: Target, opened: AbstractTarget, prompts: Prompts, context: Callable[[str], Context]
) -> None:
    """Its map is made by asking a new state at every position; chains may be shorter than asked."""
    lookup, nothing, rng = Ngram(), torch.empty(0, 0), torch.Generator()
    accepted_somewhere = 0
    for prompt in encoded_prompts(target, opened, prompts, "test", 64, context("prompts")):
        answer = decode(opened, None, prompt.ids, max_new_tokens=LENGTH + 8, ignore_eos=True).tokens
        accepted = []
        for i in range(LENGTH - 1):
            seen = torch.tensor([*prompt.ids[1:], *answer[: i + 1]])
            guesses = lookup.propose(lookup.new_state(0), Columns(seen, nothing, nothing), 8, Sampling(), rng).tokens
            right = [guess == truth for guess, truth in zip(guesses.tolist(), answer[i + 1 :], strict=False)]
            accepted.append(right.index(False) if False in right else len(right))
        for depth in (1, 3, 8):
            run = decode(opened, lookup, prompt.ids, max_new_tokens=LENGTH, depth=depth, ignore_eos=True)
            assert run.tokens == answer[:LENGTH]
            assert [(r.out_pos, r.accepted, r.emitted) for r in run.rounds] == [
                (r.out_pos, r.accepted, r.emitted) for r in replay(accepted, depth)
            ]
        accepted_somewhere += sum(accepted)
    assert accepted_somewhere > 20
