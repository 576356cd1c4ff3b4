"""Down a tree too, greedy verification says what plain decoding says and sampling keeps the target's distribution.

The statistical test draws N = 3,000 first tokens of rounds with three guesses beside each other and compares them
with the target's exact distribution by chi-square (two levels, in the whole loop: test_tree_decoding.py). Its power is
checked beside it: three wrong rules, easily written by mistake, must be rejected by the same test at the same N and
level.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chi_square import LEVEL, VOCAB, chi_square_p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.decoding.session import draw
from components.decoding.tree import DraftTree, DraftTreeRows
from components.decoding.tree_shapes import draw_distinct
from components.decoding.verification import TreeVerifyResult, verify_tree_greedy, verify_tree_sampled

NUM_ROUNDS = 3_000
CHILDREN = 3

Rule = Callable[[Tensor, DraftTreeRows, torch.Generator], TreeVerifyResult]


@settings(max_examples=100, deadline=None)
@given(parents=st.lists(st.integers(0, 30), max_size=12), seed=st.integers(0, 999))
def test_greedy_verification_keeps_the_path_of_argmaxes(parents: list[int], seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    tree = DraftTree(0)
    for parent in parents:
        known = parent % len(tree.tokens)
        taken = [tree.tokens[node] for node in range(len(tree.tokens)) if tree.parents[node] == known]
        free = [token for token in range(4) if token not in taken]
        if free:
            tree.grow(known, [free[seed % len(free)]], [-1.0])
    rows = tree.finalise()
    logits = torch.randn(len(rows.tokens), 4, generator=rng)
    verdict = verify_tree_greedy(logits, rows)
    picks = logits.argmax(-1).tolist()
    row, expected = 0, [0]
    while True:
        right = [child for child in rows.children[row] if rows.tokens[child] == picks[row]]
        if not right:
            break
        row = right[0]
        expected.append(row)
    assert verdict.rows == expected
    assert verdict.token_ids == [picks[row] for row in expected]
    assert verdict.num_accepted == len(expected) - 1


P = torch.tensor([0.30, 0.05, 0.25, 0.20, 0.15, 0.05])
Q = torch.tensor([0.10, 0.45, 0.00, 0.15, 0.05, 0.25])  # far from the target, and lacks one token altogether


def drawn(rng: torch.Generator) -> DraftTreeRows:
    """Guesses drawn without replacement."""
    return _tree(draw_distinct(Q, CHILDREN, rng), Q)


def likeliest_of_the_drawn(rng: torch.Generator) -> DraftTreeRows:
    """Wrong: tries the drawn guesses in the order of their probability."""
    return _tree(sorted(draw_distinct(Q, CHILDREN, rng), key=lambda token: -float(Q[token])), Q)


def likeliest(rng: torch.Generator) -> DraftTreeRows:
    """The drafter's best guesses: a deterministic proposal."""
    return _tree(Q.topk(CHILDREN).indices.tolist(), None)


def _tree(tokens: list[int], q: Tensor | None) -> DraftTreeRows:
    tree = DraftTree(0)
    tree.grow(0, tokens, [-1.0] * len(tokens), drawn_from=q)
    return tree.finalise()


def sample(rule: Rule, make_tree: Callable[[torch.Generator], DraftTreeRows]) -> Tensor:
    """Counts [V] of the first token of NUM_ROUNDS rounds."""
    rng, probs = torch.Generator().manual_seed(1), P.expand(CHILDREN + 1, VOCAB)
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for _ in range(NUM_ROUNDS):
        counts[rule(probs, make_tree(rng), rng).token_ids[0]] += 1
    return counts


def no_residual(probs: Tensor, tree: DraftTreeRows, rng: torch.Generator) -> TreeVerifyResult:
    """Wrong: tries every guess against the target's own distribution, as if none had been rejected before."""
    for row, token in enumerate(tree.tokens[1:], start=1):
        if float(torch.rand(1, generator=rng)) * float(Q[token]) < float(P[token]):
            return TreeVerifyResult([0, row], [token, 0])
    return TreeVerifyResult([0], [int(draw(P[None], rng))])


def forgets_what_was_drawn_before(probs: Tensor, tree: DraftTreeRows, rng: torch.Generator) -> TreeVerifyResult:
    """Wrong: takes q as it was for later guesses too, though they were drawn from what the first left."""
    p = P
    for row, token in enumerate(tree.tokens[1:], start=1):
        if float(torch.rand(1, generator=rng)) * float(Q[token]) < float(p[token]):
            return TreeVerifyResult([0, row], [token, 0])
        rest = (p - Q).clamp_min(0.0)
        p = rest / rest.sum()
    return TreeVerifyResult([0], [int(draw(p[None], rng))])


def test_children_drawn_without_replacement_keep_the_distribution_of_the_target() -> None:
    assert chi_square_p_value(sample(verify_tree_sampled, drawn), P) > LEVEL


def test_a_deterministic_tree_keeps_the_distribution_of_the_target() -> None:
    assert chi_square_p_value(sample(verify_tree_sampled, likeliest), P) > LEVEL


@pytest.mark.parametrize(
    ("rule", "make_tree"),
    [(no_residual, drawn), (forgets_what_was_drawn_before, drawn), (verify_tree_sampled, likeliest_of_the_drawn)],
    ids=["no-residual", "old-q", "likeliest-first"],
)
def test_the_statistical_test_rejects_wrong_rules(
    rule: Rule, make_tree: Callable[[torch.Generator], DraftTreeRows]
) -> None:
    assert chi_square_p_value(sample(rule, make_tree), P) < LEVEL


def test_a_guess_the_target_cannot_say_is_never_kept() -> None:
    tree = DraftTree(0)
    tree.grow(0, [0, 1], [-1.0, -1.0], drawn_from=torch.tensor([0.5, 0.5, 0.0]))
    probs = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    for seed in range(50):
        assert verify_tree_sampled(probs, tree.finalise(), torch.Generator().manual_seed(seed)).token_ids == [2]


def test_a_second_child_saves_rounds_that_the_first_loses() -> None:
    """Why branch at all: with all tokens among the children one is always kept, whatever the drafter thinks."""
    p, q = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.8, 0.1, 0.1])
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        tree = DraftTree(0)
        tree.grow(0, draw_distinct(q, 3, rng), [-1.0] * 3, drawn_from=q)
        verdict = verify_tree_sampled(torch.stack([p] * 4), tree.finalise(), rng)
        assert verdict.num_accepted == 1
