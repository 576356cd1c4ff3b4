"""Trees have maps of their own, and a method that cannot branch is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from components.bench import measure_acceptance
from components.bench.end_to_end.arms import check_branching
from components.contract import Context, Draft, Prompts, Target, UserError
from components.drafts.storage.files import method_class
from components.rows import AcceptanceMap, read_rows
from components.targets.load import open_target


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


def test_trees_of_a_method_that_cannot_branch_are_refused(target: Target) -> None:
    model, drafter = open_target(target), method_class("ngram")()
    with pytest.raises(UserError, match="guesses of ngram do not branch"):
        check_branching(model, drafter, [4])
    check_branching(model, drafter, [])
