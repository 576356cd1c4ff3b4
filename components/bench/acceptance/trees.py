"""The tree of a budget, the same in acceptance maps, cost cells and end-to-end arms, so that they can be combined.

It is EAGLE-2's dynamic tree in which only the chain is expanded (decoding/tree_shapes.py), as deep as the drafter's
trained depth and the budget allow. A budget is the number of draft tokens that one pass verifies.

Acceptance map of draft trees: for each output position, how many draft tokens a round starting there would accept.

The target's own greedy answer is known, so one pass gives the features of every position, and no tree needs a pass of
the target: the accepted path is the one that the answer follows. Unlike chains (`propose_at_every_position`), trees of
different positions cannot be drafted at once, so this drafts once per position, on a state that grows by one.
Replaying i <- i + accepted[i] + 1 over the result equals a live greedy run with this shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.bench.end_to_end.arms import Arm
from components.contract import UserError
from components.decoding.chain import GREEDY
from components.decoding.tree import DraftTreeRows
from components.decoding.tree_shapes import DynamicShape, TreeShape
from components.drafts.interface import CommittedPositions, Proposer, TreeProposer
from components.targets.interface import AbstractTarget, check_verifies_trees

TOP_K = 4  # children of an expanded node
WIDTH = 1  # nodes expanded a level: on the built-in target, more cost more drafting time than they save


def tree_shape(deepest: int, budget: int) -> DynamicShape:
    """The tree of a budget for a drafter of chains of at most `deepest` tokens."""
    return DynamicShape(depth=min(deepest, budget), top_k=min(TOP_K, budget), budget=budget, width=WIDTH)


def tree_arms(method: str, draft_key: str, trained_depth: int, budgets: Sequence[int]) -> list[Arm]:
    """The arms of a drafter's trees, by ascending budget."""
    depths = {budget: tree_shape(trained_depth, budget).depth for budget in sorted(set(budgets))}
    return [Arm(method, draft_key, depth, tree_budget=budget) for budget, depth in depths.items()]


def check_branching(target: AbstractTarget, proposer: Proposer, budgets: Sequence[int]) -> None:
    """Raises UserError for trees with a method that cannot branch, or a target that cannot verify them."""
    if budgets and not isinstance(proposer, TreeProposer):
        raise UserError(f"trees: the guesses of {proposer.method} do not branch: leave trees empty for it")
    if budgets:
        check_verifies_trees(target)


def tree_acceptance(
    target: AbstractTarget,
    proposer: TreeProposer,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    num_tokens: int,
    shape: TreeShape,
) -> list[int]:
    """Entry i: draft tokens accepted by a round that starts when output token i is the newest; num_tokens - 1 entries.

    answer:     the target's greedy tokens, end-of-text ignored, at least num_tokens - 1 + shape.depth of them.
    num_tokens: output tokens N, up to the limit or up to and including end-of-text.
    """
    if num_tokens < 2:
        return []  # the answer ends with the prefill token: no round starts
    assert len(answer) >= num_tokens - 1 + shape.depth, "the answer is too short for the drafts at its end"
    text = [*prompt_ids, *answer]
    num_columns = len(prompt_ids) + num_tokens - 2  # the last round starts at output token num_tokens - 2
    ids = torch.tensor(text[: num_columns + 1], device=target.device)
    empty = torch.empty(num_columns, 0, device=target.device)
    taps, last = empty, empty
    accepted = []
    with torch.inference_mode():
        if proposer.needs_features:
            out = target.forward(ids[None, :-1], target.new_cache(1, num_columns), logits="none", features=True)
            assert out.taps is not None and out.last is not None
            taps, last = out.taps[0], out.last[0]
        state, start = proposer.new_state(num_columns + shape.num_draft_tokens + 1), 0
        for newest in range(len(prompt_ids), num_columns + 1):
            committed = CommittedPositions(ids[start + 1 : newest + 1], taps[start:newest], last[start:newest])
            branches, start = proposer.begin(state, committed, shape.depth), newest
            vocab_size = target.shape.vocab_size
            tree = shape.grow(branches, text[newest], proposer.draft_ids, vocab_size, GREEDY, torch.Generator())
            accepted.append(count_accepted(tree, text[newest + 1 :]))
    return accepted


def count_accepted(tree: DraftTreeRows, answer: Sequence[int]) -> int:
    """How many draft tokens of a tree lie on the path that `answer` follows from the newest token."""
    children, row = tree.children, 0
    for depth, token in enumerate(answer):
        matching = [child for child in children[row] if tree.tokens[child] == token]
        if not matching:
            return depth
        row = matching[0]
    return len(answer)
