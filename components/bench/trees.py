"""The tree of a budget, the same in acceptance maps, cost cells and end-to-end arms, so that they can be combined.

It is EAGLE-2's dynamic tree in which only the chain is expanded (decoding/tree_shapes.py), as deep as the drafter's
trained depth and the budget allow. A budget is the number of draft tokens that one pass verifies.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.bench.arms import Arm
from components.contract import UserError
from components.decoding.tree_shapes import DynamicShape
from components.drafts.draft import Proposer, TreeProposer

TOP_K = 4  # children of an expanded node
WIDTH = 1  # nodes expanded a level: on the built-in target, more cost more drafting time than they save


def tree_shape(deepest: int, budget: int) -> DynamicShape:
    """The tree of a budget for a drafter of chains of at most `deepest` tokens."""
    return DynamicShape(depth=min(deepest, budget), top_k=min(TOP_K, budget), budget=budget, width=WIDTH)


def tree_arms(method: str, draft_key: str, trained_depth: int, budgets: Sequence[int]) -> list[Arm]:
    """The arms of a drafter's trees, by ascending budget."""
    depths = {budget: tree_shape(trained_depth, budget).depth for budget in sorted(set(budgets))}
    return [Arm(method, draft_key, depth, tree_budget=budget) for budget, depth in depths.items()]


def check_branching(proposer: Proposer, budgets: Sequence[int]) -> None:
    """Raises UserError for trees with a method that cannot branch."""
    if budgets and not isinstance(proposer, TreeProposer):
        raise UserError(f"trees: the guesses of {proposer.method} do not branch: leave trees empty for it")
