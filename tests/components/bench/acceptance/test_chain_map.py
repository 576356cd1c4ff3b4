"""A map says what live decoding does, at every depth, for every drafting method."""

from __future__ import annotations

import copy
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_subjects import VOCAB, train_briefly
from hypothesis import given
from hypothesis import strategies as st

from components.bench import measure_acceptance
from components.bench.acceptance.chain_map import acceptance_map, repeated_bigrams
from components.bench.acceptance.trees import check_branching, tree_acceptance, tree_shape
from components.bench.prompts import greedy_answers, kept_length
from components.contract import Context, Draft, Prompts, Target, UserError
from components.decoding.batch import decode_tree
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.interface import AbstractDraft, Drafter, TreeProposer
from components.drafts.storage.files import build_draft, method_class, save_draft
from components.methods import METHODS
from components.rows import AcceptanceMap, read_rows
from components.speedup.prediction.replay import replay
from components.targets.interface import AbstractTarget

LENGTH = 40
DEEPEST = 7
SMALL: dict[str, dict[str, Any]] = {"p-eagle": {"num_layers": 1, "parallel_depth": 4}}  # where the default is slow


@pytest.fixture(scope="module")
def answers(opened: AbstractTarget) -> list[tuple[list[int], list[int]]]:
    """Prompts and the target's greedy answers, end-of-text ignored, a few tokens longer than asked."""
    dice = random.Random(2)
    asked = [[dice.randrange(3, VOCAB) for _ in range(size)] for size in (3, 12, 1)]
    return list(zip(asked, greedy_answers(opened, asked, LENGTH + DEEPEST, 3), strict=True))


def briefly_trained(method: str, opened: AbstractTarget) -> Drafter:
    """A drafter of the method over every token; right now and then, not always."""
    drafter: Drafter = build_draft(method, opened, SMALL.get(method, {}), torch.arange(VOCAB))
    if isinstance(drafter, AbstractDraft):
        dice = random.Random(1)
        train_briefly(drafter, opened, [[dice.randrange(3, VOCAB) for _ in range(6)] for _ in range(24)])
        drafter.eval()
        drafter.prepare_decoding()
    return drafter


@pytest.mark.parametrize("method", sorted(name for name, method in METHODS.items() if not method.decoding_loop))
def test_replaying_a_map_is_decoding_live_at_every_depth(
    method: str, opened: AbstractTarget, answers: list[tuple[list[int], list[int]]]
) -> None:
    """Token for token and round for round, as a chain and as a tree, end-of-text included, which the target says.

    Methods with a decoding loop of their own (lookahead) guess from earlier passes: see the next test.
    """
    drafter = briefly_trained(method, opened)
    deepest = min(drafter.max_depth, DEEPEST)
    session = Session(opened)
    accepted_somewhere = 0
    for prompt, answer in answers:
        kept = kept_length(answer[:LENGTH], opened.shape.eos_token_ids)
        found = acceptance_map(opened, drafter, prompt, answer, kept, deepest)
        assert len(found.accepted) == len(found.proxy_accepted) == kept - 1
        for depth in range(1, deepest + 1):
            run = decode(opened, drafter, prompt, max_new_tokens=LENGTH, depth=depth, session=session)
            assert run.tokens == answer[:kept]
            assert without_drafted(run.rounds) == without_drafted(replay(found.accepted, depth))
            assert all(r.drafted == depth for r in run.rounds) or method == "ngram", "only a look-up may find less"
        accepted_somewhere += sum(found.accepted)
        assert all((proxy > 0) == (a > 0) for a, proxy in zip(found.accepted, found.proxy_accepted, strict=True))
        if isinstance(drafter, TreeProposer):
            shape = tree_shape(deepest, 6)
            path_lengths = tree_acceptance(opened, drafter, prompt, answer, kept, shape)
            tree_run = decode_tree(opened, drafter, prompt, shape, max_new_tokens=LENGTH)
            assert tree_run.tokens == answer[:kept]
            assert without_drafted(tree_run.rounds) == without_drafted(replay(path_lengths, shape.depth))
    assert accepted_somewhere > 10, "the drafter is never right: nothing was tested"


@pytest.mark.parametrize("method", sorted(name for name, method in METHODS.items() if method.decoding_loop))
def test_a_map_of_guesses_from_earlier_passes_is_the_live_run_at_the_deepest_depth(
    method: str, opened: AbstractTarget, answers: list[tuple[list[int], list[int]]]
) -> None:
    drafter = briefly_trained(method, opened)
    deepest, accepted = drafter.max_depth, 0
    for prompt, answer in answers:
        kept = kept_length(answer[:LENGTH], opened.shape.eos_token_ids)
        found = acceptance_map(opened, drafter, prompt, answer, kept, deepest)
        assert len(found.accepted) == len(found.proxy_accepted) == kept - 1
        assert all(later >= now - 1 for now, later in itertools.pairwise(found.accepted))
        run = decode(opened, drafter, prompt, max_new_tokens=LENGTH, depth=deepest)
        assert run.tokens == answer[:kept]
        assert without_drafted(run.rounds) == without_drafted(replay(found.accepted, deepest))
        accepted += sum(found.accepted)
    assert accepted > 10, "nothing was ever kept: nothing was tested"


def without_drafted(rounds: Sequence[Any]) -> list[tuple[int, int, int]]:
    return [(r.out_pos, r.accepted, r.emitted) for r in rounds]


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


def test_trees_have_maps_of_their_own(
    target: Target, drafts: list[Draft], prompts: Prompts, context: Callable[[str], Context]
) -> None:
    """One a prompt and budget, beside the chain's, never above the tree's depth; more guesses keep more in all."""
    ctx = context("trees")
    made = measure_acceptance(target, drafts[0], prompts, max_new_tokens=16, trees=[3, 9], ctx=ctx)
    maps = read_rows(ctx.out, AcceptanceMap)
    kept: dict[int | None, int] = {}
    for m in maps:
        kept[m.tree_budget] = kept.get(m.tree_budget, 0) + sum(m.accepted)
        assert m.k_max == (3 if m.tree_budget == 3 else 4) and max(m.accepted, default=0) <= m.k_max
        assert len(m.accepted) == m.num_tokens - 1
        assert (m.proxy_accepted == []) == (m.tree_budget is not None)
    assert set(kept) == {None, 3, 9} and len(maps) == 15
    assert (made.info["num_prompts"], made.info["trees"]) == (5, [3, 9])
    assert kept[9] >= kept[None], "a tree that keeps the chain accepts at least as much from any position"


def test_trees_of_a_method_that_cannot_branch_are_refused() -> None:
    with pytest.raises(UserError, match="guesses of ngram do not branch"):
        check_branching(method_class("ngram")(), [4])
    check_branching(method_class("ngram")(), [])


def test_a_loop_of_its_own_is_left_room_for_its_window(
    opened: AbstractTarget, target: Target, tmp_path: Path, context: Callable[[str], Context]
) -> None:
    """A prompt that leaves room for the guesses but not for the window is set aside; it does not fail the step."""
    settings = {"window": 30, "ngram_size": 8}
    drafter = build_draft("lookahead", opened, settings, torch.arange(VOCAB))
    facts = {"num_steps": drafter.num_steps, "max_depth": drafter.max_depth, "target_key": target.key, "trained": False}
    (tmp_path / "draft").mkdir()
    save_draft(tmp_path / "draft", "lookahead", settings, opened, torch.arange(VOCAB), {}, facts)
    draft = Draft(key="l" * 64, path=tmp_path / "draft")
    rows = []
    for number, words in enumerate((20, 192 - 16 - 20)):
        row = {"prompt_id": f"test-{number}", "split": "test", "workload": "w", "source": "s", "reference": ""}
        rows.append(json.dumps({**row, "prompt": " ".join(["w5"] * words)}))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    ctx = context("acceptance")
    made = measure_acceptance(
        target, draft, Prompts(key="p" * 64, path=tmp_path / "prompts"), max_new_tokens=16, max_depth=1, ctx=ctx
    )
    assert made.info["num_prompts"] == 1


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
