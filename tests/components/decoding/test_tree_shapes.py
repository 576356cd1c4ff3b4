"""A tree is connected, sees ancestors only, holds the drafter's best guesses, and is what EAGLE-2's rules say."""

from __future__ import annotations

import itertools

import pytest
import torch
from hashed_branches import DRAFT_IDS, GREEDY, VOCAB, grow, logits_after
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.contract import UserError
from components.decoding.session import draw
from components.decoding.tree import DraftTreeRows
from components.decoding.tree_shapes import DynamicShape, StaticShape, TreeShape, draw_distinct
from components.drafts.interface import DepthBranches, Sampling
from components.stop_rule import Calibration, StopRule


def paths_of(tree: DraftTreeRows) -> list[tuple[int, ...]]:
    """The tokens from the newest one to each row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token))
    return paths


def greedy_chain(seed: int, depth: int) -> list[tuple[int, ...]]:
    path: tuple[int, ...] = ()
    found = []
    for _ in range(depth):
        path = (*path, int(DRAFT_IDS[logits_after(path, seed).argmax()]))
        found.append(path)
    return found


def eagle2(seed: int, depth: int, top_k: int, budget: int) -> set[tuple[int, ...]]:
    """The published rule on explicit paths: expand the top_k best of each level, keep the budget best of all."""

    def value(path: tuple[int, ...]) -> float:
        total = 0.0
        for i, token in enumerate(path):
            log_probs = logits_after(path[:i], seed).log_softmax(-1)
            total += float(log_probs[DRAFT_IDS.tolist().index(token)])
        return total

    level: list[tuple[int, ...]] = [()]
    every: list[tuple[int, ...]] = []
    for _ in range(depth):
        children = []
        for path in level:
            best = logits_after(path, seed).topk(min(top_k, len(DRAFT_IDS))).indices
            children += [(*path, int(DRAFT_IDS[i])) for i in best]
        every += children
        level = sorted(children, key=value, reverse=True)[:top_k]
    return set(sorted(every, key=value, reverse=True)[:budget])


dynamic = st.builds(
    lambda depth, top_k, extra, keep, width: DynamicShape(depth, top_k, depth + extra, keep, width),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 12),
    st.booleans(),
    st.none() | st.integers(1, 3),
)
static = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(StaticShape.branching)
unit = st.floats(0.0, 1.0)
rules = st.lists(st.tuples(unit, unit, unit), min_size=1, max_size=4).map(
    lambda steps: StopRule(
        tuple(Calibration((0.0, 1.0), (0.0, top)) for top, _, _ in steps),
        (0.0, *(draft * 0.3 for _, draft, _ in steps[1:])),
        tuple(verify * 0.3 for _, _, verify in steps),
    )
)


@settings(max_examples=60, deadline=None)
@given(shape=st.one_of(dynamic, static), seed=st.integers(0, 999), hot=st.booleans())
def test_rows_see_their_ancestors_and_lie_at_their_depth(shape: TreeShape, seed: int, hot: bool) -> None:
    tree = grow(shape, seed, Sampling(temperature=0.8) if hot else GREEDY)
    paths = paths_of(tree)
    assert tree.tokens[0] == 99 and tree.parents[0] == -1
    assert len(set(paths)) == len(paths) <= shape.num_draft_tokens + 1
    assert tree.depths == [len(path) for path in paths] and max(tree.depths) <= shape.depth
    assert all(token in DRAFT_IDS for token in tree.tokens[1:])
    visible = tree.visible()
    for i, j in itertools.product(range(len(paths)), repeat=2):
        assert bool(visible[i, j]) == (paths[i][: len(paths[j])] == paths[j])


def survives(path: tuple[int, ...], rule: StopRule, seed: int) -> bool:
    """Whether a rule leaves a path of likeliest children: each node verified, each but the last expanded."""
    survival, ids = 1.0, DRAFT_IDS.tolist()
    for depth, token in enumerate(path):
        if depth >= rule.depth or (depth and survival < rule.draft_from[depth]):
            return False
        said = logits_after(path[:depth], seed).log_softmax(-1).exp()
        survival = rule.survival(depth, survival, float(said[ids.index(token)]))
        if survival < rule.verify_from[depth]:
            return False
    return True


@settings(max_examples=100, deadline=None)
@given(rule=rules, static_shape=static, dynamic_shape=dynamic, seed=st.integers(0, 999))
def test_a_rule_prunes_what_does_not_survive(
    rule: StopRule, static_shape: StaticShape, dynamic_shape: DynamicShape, seed: int
) -> None:
    """A tree of likeliest children loses exactly the nodes below the thresholds; drawn siblings go together."""
    whole, pruned = (paths_of(grow(static_shape, seed, Sampling(stop=stop))) for stop in (None, rule))
    assert set(pruned) == {path for path in whole if survives(path, rule, seed)}
    assert all(survives(path, rule, seed) for path in paths_of(grow(dynamic_shape, seed, Sampling(stop=rule))))
    drawn = grow(static_shape, seed, Sampling(temperature=0.8, stop=rule))
    siblings = [
        sum(len(path) == depth for path in static_shape.paths if path[:-1] == (0,) * (depth - 1))
        for depth in range(1, static_shape.depth + 1)
    ]
    for depth, children in zip(drawn.depths, drawn.children, strict=True):
        assert len(children) in ((0, siblings[depth]) if depth < static_shape.depth else (0,))


@settings(max_examples=60, deadline=None)
@given(depth=st.integers(1, 5), top_k=st.integers(1, 4), budget=st.integers(1, 14), seed=st.integers(0, 999))
def test_the_dynamic_tree_is_the_published_one(depth: int, top_k: int, budget: int, seed: int) -> None:
    tree = grow(DynamicShape(depth, top_k, budget, keep_chain=False), seed)
    assert set(paths_of(tree)[1:]) == eagle2(seed, depth, top_k, budget)


@settings(max_examples=60, deadline=None)
@given(depth=st.integers(1, 5), top_k=st.integers(1, 4), extra=st.integers(0, 12), seed=st.integers(0, 999))
def test_the_greedy_chain_is_in_the_tree(depth: int, top_k: int, extra: int, seed: int) -> None:
    tree = grow(DynamicShape(depth, top_k, depth + extra), seed)
    assert set(greedy_chain(seed, depth)) <= set(paths_of(tree))
    static_tree = grow(StaticShape.branching([2] * min(depth, 3)), seed)
    assert set(greedy_chain(seed, min(depth, 3))) <= set(paths_of(static_tree))


@pytest.mark.parametrize("width", [1, 2])
def test_a_narrow_tree_expands_no_more_than_its_width_and_the_chain_first(width: int) -> None:
    for seed in range(10):
        paths = paths_of(grow(DynamicShape(4, 3, 40, width=width), seed))
        chain = greedy_chain(seed, 4)
        assert paths[1:5] == chain, "the chain's rows follow the newest token's, so that keeping them moves nothing"
        for depth in range(1, 4):
            expanded = {path[:-1] for path in paths if len(path) == depth + 1}
            assert len(expanded) == width and chain[depth - 1] in expanded
        assert len(paths) == 1 + 3 + 3 * 3 * width


def test_few_nodes_without_the_chain_drop_it_and_with_it_keep_it() -> None:
    """The reason for keep_chain: there are drafters whose chain the published rule leaves out."""
    dropped = sum(
        not set(greedy_chain(s, 4)) <= set(paths_of(grow(DynamicShape(4, 3, 8, False), s))) for s in range(40)
    )
    kept = sum(set(greedy_chain(s, 4)) <= set(paths_of(grow(DynamicShape(4, 3, 8), s))) for s in range(40))
    assert dropped > 10 and kept == 40


def test_a_larger_budget_keeps_what_a_smaller_one_kept() -> None:
    for seed in range(10):
        small, large = (set(paths_of(grow(DynamicShape(4, 3, budget), seed))) for budget in (6, 11))
        assert small < large


def test_static_shapes_are_their_paths() -> None:
    shape = StaticShape(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
    assert (shape.depth, shape.num_draft_tokens) == (3, 5)
    found = set(paths_of(grow(shape, 5)))
    best = DRAFT_IDS[logits_after((), 5).topk(2).indices].tolist()
    below = DRAFT_IDS[logits_after((best[0],), 5).topk(2).indices].tolist()
    deepest = int(DRAFT_IDS[logits_after((best[0], below[0]), 5).argmax()])
    assert found == {(), (best[0],), (best[1],), (best[0], below[0]), (best[0], below[1]), (best[0], below[0], deepest)}
    assert paths_of(grow(StaticShape.chain(4), 7))[1:] == greedy_chain(7, 4)


def test_heads_that_do_not_see_the_path_say_one_distribution_a_depth() -> None:
    logits = torch.randn(3, len(DRAFT_IDS), generator=torch.Generator().manual_seed(0))
    tree = StaticShape.branching([2, 2, 1]).grow(DepthBranches(logits), 5, DRAFT_IDS, VOCAB, GREEDY, torch.Generator())
    for row, path in enumerate(paths_of(tree)):
        if path:
            ranked = DRAFT_IDS[logits[len(path) - 1].argsort(descending=True)].tolist()
            assert ranked.index(path[-1]) == tree.children[tree.parents[row]].index(row)


def test_shapes_that_mean_nothing_are_refused() -> None:
    for paths in ((), ((0, 0),), ((1,),), ((0,), (0, 1)), ((0,), ())):
        with pytest.raises(UserError, match="tree"):
            StaticShape(paths)
    for bad in ({"depth": 0}, {"top_k": 0}, {"depth": 5, "budget": 4}):
        with pytest.raises(UserError, match="tree"):
            DynamicShape(**bad)  # type: ignore[arg-type]


def test_distinct_draws_are_those_of_drawing_without_replacement() -> None:
    """Pairs over 20,000 draws against p(x) p(y) / (1 - p(x)); chi-square, level 1e-4, 19 degrees of freedom.

    Drawing with replacement of the rejected kind (redraw until different) is the same distribution; independent pairs
    sorted by probability is a wrong one, and is rejected below.
    """
    probs = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05, 0.0])
    rng = torch.Generator().manual_seed(3)
    counts, wrong = torch.zeros(6, 6), torch.zeros(6, 6)
    for _ in range(20_000):
        first, second = draw_distinct(probs, 2, rng)
        counts[first, second] += 1
        ordered = sorted((first, second))
        wrong[ordered[0], ordered[1]] += 1
    expected = probs[:, None] * probs / (1 - probs)[:, None]
    expected = (expected - expected.diagonal().diag()) * 20_000
    likely = expected > 0
    assert not counts[~likely].any()

    def p_value(seen: Tensor) -> float:
        statistic = ((seen - expected)[likely] ** 2 / expected[likely]).sum().double()
        freedom = torch.tensor((int(likely.sum()) - 1) / 2, dtype=torch.float64)
        return float(torch.special.gammaincc(freedom, statistic / 2))

    assert p_value(counts) > 1e-4 > p_value(wrong)
    assert draw_distinct(probs, 6, rng) != [] and len(draw_distinct(probs, 6, rng)) == 5
    assert int(draw(probs[None], rng)) < 5
