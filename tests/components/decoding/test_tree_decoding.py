"""Decoding with trees says what plain decoding says; its rounds replay its acceptance map; sampling is unbiased."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cheap_drafter import PROMPTS, Cheap, exact_triples
from chi_square import LEVEL, chi_square_p_value
from torch import Tensor
from twin import Twin

from components.bench.acceptance import tree_acceptance
from components.contract import UserError
from components.decoding.batch import decode_batch, decode_tree
from components.decoding.chain import decode
from components.decoding.session import draw
from components.decoding.tree import DraftTreeRows
from components.decoding.tree_shapes import DynamicShape, StaticShape, TreeShape, draw_distinct
from components.decoding.verification import TreeVerifyResult
from components.drafts.interface import Sampling
from components.drafts.methods.ngram import Ngram
from components.speedup.prediction.replay import replay
from components.stop_rule import Calibration, StopRule
from components.targets.interface import AbstractTarget

LENGTH = 30
SHAPES: dict[str, TreeShape] = {
    "chain": StaticShape.chain(4),
    "static": StaticShape.branching([3, 2, 1]),
    "medusa-paths": StaticShape(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))),
    "dynamic": DynamicShape(depth=4, top_k=3, budget=10),
    "published": DynamicShape(depth=4, top_k=3, budget=10, keep_chain=False),
}


AS_SAID = StopRule((Calibration((0.0, 1.0), (0.0, 1.0)),) * 4, (0.0, 0.2, 0.1, 0.05), (0.1, 0.06, 0.04, 0.03))
"""Confidence taken at its word, with thresholds that leave some of every tree."""


def answer_of(target: AbstractTarget, prompt: Sequence[int], length: int = LENGTH + 8) -> list[int]:
    return decode(target, None, prompt, max_new_tokens=length, ignore_eos=True).tokens


@pytest.mark.parametrize("name", SHAPES)
def test_a_live_tree_run_is_plain_decoding_and_the_replay_of_its_map(target: AbstractTarget, name: str) -> None:
    shape, accepted = SHAPES[name], 0
    for prompt in PROMPTS:
        answer = answer_of(target, prompt)
        run = decode_tree(target, Twin(target), prompt, shape, max_new_tokens=LENGTH, ignore_eos=True)
        assert run.tokens == answer[:LENGTH] and run.tokens_raw == answer[: len(run.tokens_raw)]
        map_ = tree_acceptance(target, Twin(target), prompt, answer, LENGTH, shape)
        expected = replay(map_, shape.depth)
        assert [(r.out_pos, r.accepted, r.emitted) for r in run.rounds] == [
            (r.out_pos, r.accepted, r.emitted) for r in expected
        ]
        assert [r.kv_len for r in run.rounds] == [len(prompt) + r.out_pos for r in expected]
        assert all(0 < r.drafted <= shape.num_draft_tokens for r in run.rounds)
        accepted += sum(r.accepted for r in run.rounds)
    assert accepted > 20, "the drafter is never right, so this test checks nothing"


def test_a_tree_accepts_at_least_as_much_as_the_chain_of_its_depth_everywhere(target: AbstractTarget) -> None:
    """By construction: the chain's guesses are in the tree. Some branch must also have been worth it."""
    gained = 0
    for prompt in PROMPTS:
        answer = answer_of(target, prompt)
        chain = tree_acceptance(target, Twin(target), prompt, answer, LENGTH, StaticShape.chain(4))
        rounds = decode(target, Twin(target), prompt, max_new_tokens=LENGTH, depth=4, ignore_eos=True).rounds
        assert [(r.out_pos, r.accepted) for r in rounds] == [(r.out_pos, r.accepted) for r in replay(chain, 4)]
        for shape in (DynamicShape(4, 3, 8), DynamicShape(4, 3, 12), StaticShape.branching([2, 2, 2, 1])):
            tree = tree_acceptance(target, Twin(target), prompt, answer, LENGTH, shape)
            assert all(t >= c for t, c in zip(tree, chain, strict=True))
            gained += sum(tree) - sum(chain)
        budgets = [
            tree_acceptance(target, Twin(target), prompt, answer, LENGTH, DynamicShape(4, 3, b)) for b in (4, 8, 16)
        ]
        assert budgets[0] == chain
        assert all(a <= b <= c for a, b, c in zip(*budgets, strict=True))
    assert gained > 0


def test_end_of_text_stops_a_tree(target: AbstractTarget) -> None:
    answer = answer_of(target, PROMPTS[0])
    end = answer[13]
    run = decode_tree(target, Twin(target), PROMPTS[0], SHAPES["dynamic"], max_new_tokens=LENGTH, eos_ids=[end])
    assert run.tokens == answer[: answer.index(end) + 1] and run.status == "eos"


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_a_pruned_tree_says_the_same_with_fewer_draft_tokens(target: AbstractTarget, name: str) -> None:
    shape, numbers = SHAPES[name], set[int]()
    for prompt in PROMPTS:
        whole, pruned = (
            decode_tree(target, Twin(target), prompt, shape, max_new_tokens=LENGTH, ignore_eos=True, stop=stop)
            for stop in (None, AS_SAID)
        )
        assert pruned.tokens == whole.tokens
        assert sum(r.drafted for r in pruned.rounds) < sum(r.drafted for r in whole.rounds)
        numbers |= {r.drafted for r in pruned.rounds}
    assert len(numbers) > 2, "the rule never chose"


def keeps_the_first_child(probs: Tensor, tree: DraftTreeRows, rng: torch.Generator) -> TreeVerifyResult:
    """Wrong: keeps the first guess whenever the target could say it at all."""
    child = tree.children[0][0]
    if probs[0, tree.tokens[child]] > 0:
        return TreeVerifyResult([0, child], [tree.tokens[child], int(draw(probs[child][None], rng))])
    return TreeVerifyResult([0], [int(draw(probs[:1], rng))])


def without_unlikely(probs: Tensor, count: int, rng: torch.Generator) -> list[int]:
    """Wrong: leaves drawn children out by what they are."""
    return [token for token in draw_distinct(probs, count, rng) if probs[token] >= 0.3]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, rule) for name in ("static", "dynamic") for rule in ("right", "wrong", "pruned")),
        ("static", "pruned by what was drawn"),
    ],
)
def test_sampled_trees_keep_the_distribution_of_the_whole_loop(
    target: AbstractTarget, name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first three tokens of N = 1,000 generations in batches against their exact distribution (27 cells).

    Chi-square at level 1e-4. The static tree draws its children, the dynamic one takes the likeliest. Power: the same
    test on the same loop must reject a rule that keeps whatever is possible, and one that prunes what it has drawn.
    """
    if rule == "wrong":
        monkeypatch.setattr("components.decoding.batch.verify_tree_sampled", keeps_the_first_child)
    if rule == "pruned by what was drawn":
        monkeypatch.setattr("components.decoding.tree_shapes.draw_distinct", without_unlikely)
    hot, count, batch = Sampling(temperature=1.0, top_k=3), 1000, 100
    cells = exact_triples(target, PROMPTS[0], hot)
    drafter = Cheap(cells)
    seen = dict.fromkeys(cells, 0)
    accepted, numbers = 0, set[int]()
    for first in range(0, count, batch):
        runs = decode_batch(
            target,
            drafter,  # type: ignore[arg-type]
            [PROMPTS[0]] * batch,
            max_new_tokens=3,
            shape=SHAPES[name],
            sampling=hot,
            rngs=[torch.Generator().manual_seed(first + i) for i in range(batch)],
            ignore_eos=True,
            stop=AS_SAID if rule == "pruned" else None,
        )
        for run in runs:
            seen[tuple(run.tokens)] += 1
            accepted += run.rounds[0].accepted
            numbers |= {facts.drafted for facts in run.rounds}
    assert accepted > count / 4 or "pruned" in rule
    assert len(numbers) > 1 or "pruned" not in rule, "the rule never chose"
    p_value = chi_square_p_value(torch.tensor(list(seen.values())), torch.tensor(list(cells.values())))
    assert (p_value > LEVEL) == (rule in ("right", "pruned"))


def test_sampled_trees_are_reproducible_by_seed(target: AbstractTarget) -> None:
    def run(seed: int, name: str) -> list[int]:
        return decode_tree(
            target,
            Twin(target),
            PROMPTS[0],
            SHAPES[name],
            max_new_tokens=20,
            sampling=Sampling(1.5, top_p=0.9),
            rng=torch.Generator().manual_seed(seed),
            ignore_eos=True,
        ).tokens

    for name in ("static", "dynamic"):
        assert run(1, name) == run(1, name) != run(2, name)


def test_wrong_requests_are_refused_in_one_line(target: AbstractTarget) -> None:
    with pytest.raises(UserError, match="do not branch"):
        decode_tree(target, Ngram(), [1, 2], SHAPES["static"], max_new_tokens=4)
    with pytest.raises(UserError, match="depth 9 is outside"):
        decode_tree(target, Twin(target), [1], StaticShape.chain(9), max_new_tokens=4)
    with pytest.raises(UserError, match="the target has 256"):
        decode_tree(target, Twin(target), [1] * 250, SHAPES["static"], max_new_tokens=40)
    with pytest.raises(UserError, match="seeded generator"):
        decode_tree(target, Twin(target), [1], SHAPES["static"], max_new_tokens=4, sampling=Sampling(1.0))
