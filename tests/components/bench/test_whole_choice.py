"""What the measuring steps write is what the choosing steps read: trees, batches and contexts, end to end, tiny."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from components.bench import compare_end_to_end, measure_acceptance, measure_step_cost
from components.contract import Context, Draft, Machine, Prompts, Target
from components.drafts import add_suffix
from components.policy import read_policy
from components.rows import AcceptanceMap, read_rows
from components.speedup import choose_depth, confirm_depth


def test_measured_trees_batches_and_contexts_reach_the_policy(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    context: Callable[[str], Context],
    machine: Machine,
    here_instead: None,
) -> None:
    draft = drafts[0]
    acceptance = measure_acceptance(target, draft, prompts, max_new_tokens=16, trees=[5], ctx=context("maps"))
    cost = measure_step_cost(
        target,
        [draft],
        prompts,
        kv_lengths=[16, 32],
        batch_sizes=[1, 2],
        trees=[5],
        tokens_per_block=20,
        seconds=0.5,
        num_processes=2,
        num_threads=1,
        ctx=context("cost"),
        machine=machine,
    )
    chosen = choose_depth([acceptance], [cost], num_draws=400, ctx=context("chosen"))
    policy = read_policy(chosen.path)
    assert {c.batch_size for c in policy.choices} == {1, 2}
    assert {(c.batch_size, c.kv_len) for c in policy.contexts} == {(b, n) for b in (1, 2) for n in (16, 32)}
    assert {(e.batch_size, e.tree_budget) for e in policy.trees} == {(1, 5), (2, 5)}
    assert {c.tree_budget for c in policy.ranking if c.depth_k} <= {None, 5} and len(policy.ranking) == 2
    measured = compare_end_to_end(
        target,
        drafts[:1],
        prompts,
        chosen,
        depths=[1, 2],
        trees=[5],
        num_prompts=2,
        max_new_tokens=16,
        seconds=0.5,
        num_processes=2,
        num_threads=1,
        ctx=context("measured"),
        machine=machine,
    )
    confirmed = read_policy(confirm_depth(chosen, measured, num_draws=400, ctx=context("confirmed")).path)
    tree = next(e for e in confirmed.trees if e.batch_size == 1)
    assert tree.speedup_meas is not None and tree.al_meas is not None
    assert {a.tree_budget for a in confirmed.arms if a.method == draft.info["method"]} == {None, 5}


def test_a_drafter_with_suffix_decoding_beside_it_is_chosen_like_any_other(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    context: Callable[[str], Context],
    machine: Machine,
    here_instead: None,
) -> None:
    both = add_suffix(drafts[0], min_score=0.5, depth=1, ctx=context("both"))
    timed: dict[str, Any] = {"seconds": 0.5, "num_processes": 2, "num_threads": 1, "machine": machine}
    maps = measure_acceptance(target, both, prompts, max_new_tokens=24, max_depth=4, ctx=context("maps"))
    cost = measure_step_cost(
        target, [both], prompts, max_depth=4, kv_lengths=[32], tokens_per_block=20, ctx=context("cost"), **timed
    )
    kept = [row.accepted for row in read_rows(maps.path, AcceptanceMap)]
    assert max(map(max, kept)) > 1, "copies: the drafter's own chains end at one token"
    chosen = choose_depth([maps], [cost], num_draws=400, ctx=context("chosen"))
    limits: dict[str, Any] = {"depths": [3], "num_prompts": 2, "max_new_tokens": 24}
    measured = compare_end_to_end(target, [both], prompts, chosen, ctx=context("measured"), **limits, **timed)
    confirmed = read_policy(confirm_depth(chosen, measured, num_draws=400, ctx=context("confirmed")).path)
    arm = next(arm for arm in confirmed.arms if arm.draft_key == both.key and arm.depth_k == 3)
    assert arm.divergences == 0 and arm.al is not None and arm.al >= 1.0
