"""Which tree a budget means, the same in acceptance maps, cost cells and end-to-end arms, so that they can be combined.

EAGLE-2's dynamic tree with the chain kept and alone expanded (decoding/tree_shapes.py), as deep as the drafter is
trained for and the budget holds. A budget is the number of guesses that one pass verifies; the depth alone is a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.contract import UserError
from components.decoding.tree_shapes import DynamicShape
from components.drafts.draft import Proposer, TreeProposer

TOP_K = 4  # children of an expanded node
WIDTH = 1  # nodes expanded a level: on the built-in target more of them cost more time to draft than they save


def tree_shape(deepest: int, budget: int) -> DynamicShape:
    """The tree of a budget for a drafter that is asked for chains of at most `deepest`."""
    return DynamicShape(depth=min(deepest, budget), top_k=min(TOP_K, budget), budget=budget, width=WIDTH)


def check_branching(proposer: Proposer, budgets: Sequence[int]) -> None:
    """Raises UserError when trees are asked of a method whose guesses do not branch."""
    if budgets and not isinstance(proposer, TreeProposer):
        raise UserError(f"trees: the guesses of {proposer.method} do not branch: leave trees empty for it")
