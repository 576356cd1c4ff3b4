"""What is served is what was chosen and measured at the smallest batch size; no other batch stands in for it.

Of drafters as good as each other the one with the smaller tree or vocabulary wins, and chains are served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated_rows import DRAFT, DRAFT_MS, VERIFY_MS, make_cells, make_maps, make_request

from components.contract import Context, DepthPolicy, Measurements
from components.engines.depth_settings import engine_settings
from components.policy import Policy, faults_of, read_policy
from components.refusals import PROMPTS
from components.rows import CostCell
from components.speedup import choose_depth, confirm_depth
from components.speedup.bootstrap import Estimate
from components.speedup.choose import Contender, rank

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]
CHEAP: tuple[list[float], list[float]] = ([3.2, 3.4], [0.2, 0.4])
DEAR: tuple[list[float], list[float]] = ([9.0, 12.0], [3.0, 6.0])


@pytest.fixture
def chosen(measurements: Rows, new_ctx: NewCtx) -> Callable[..., DepthPolicy]:
    """A policy for batch sizes 1 and 8, each at the cost given."""

    def run(one: tuple[list[float], list[float]], eight: tuple[list[float], list[float]]) -> DepthPolicy:
        maps = make_maps([0.9, 0.8], num_prompts=40, num_tokens=65, seed=1)
        cells: list[CostCell] = list(make_cells(3.0, *one))
        cells += [dataclasses.replace(c, batch_size=8) for c in make_cells(3.0, *eight)]
        return choose_depth([measurements(list(maps))], [measurements(list(cells))], ctx=new_ctx())

    return run


def decoded(speed_by_batch: dict[int, float], num_prompts: int = 40) -> list[object]:
    """Plain decoding and depth 2 on the same prompts at each batch size."""
    rows: list[object] = []
    for size, speed in speed_by_batch.items():
        for n in range(num_prompts):
            seconds = 1.0 + 0.3 * (n % 5)
            rows.append(make_request("none", 0, n, 65, seconds, batch_size=size))
            rows.append(make_request("eagle3", 2, n, 65, seconds / speed, batch_size=size, num_rounds=26))
    return rows


def confirmed(
    policy: DepthPolicy, rows: list[object], measurements: Rows, new_ctx: NewCtx
) -> tuple[Policy, dict[str, Any]]:
    made = confirm_depth(policy, measurements(rows), max_prediction_gap=10.0, ctx=new_ctx())
    return read_policy(made.path), dict(made.info)


def test_a_batch_that_measured_slower_is_told_to_draft_nothing(
    chosen: Callable[..., DepthPolicy], measurements: Rows, new_ctx: NewCtx
) -> None:
    policy, info = confirmed(chosen(CHEAP, CHEAP), decoded({1: 1.6, 8: 0.7}), measurements, new_ctx)
    verdicts = {c.batch_size: c.verdict for c in policy.choices if c.workload == "all"}
    assert verdicts == {1: "use", 8: "do_not_speculate"}
    told = engine_settings(policy, ())["vllm"]["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert told == [[1, 1, 2], [2, 8, 0]]
    assert info["speedup_meas"] == pytest.approx(1.6) and info["speedup_pred_same_prompts"] is not None


def test_the_headline_is_of_the_smallest_batch(
    chosen: Callable[..., DepthPolicy], measurements: Rows, new_ctx: NewCtx
) -> None:
    """Batch 8 is predicted to gain more; a drafter is served at batch 1 first."""
    policy = chosen(([3.5, 3.9], [0.3, 0.6]), CHEAP)
    pooled = {c.batch_size: c for c in read_policy(policy.path).choices if c.workload == "all"}
    assert pooled[8].pred_lo > pooled[1].pred_lo
    assert policy.info["speedup_pred"] == pooled[1].speedup_pred
    tree = [dataclasses.replace(r, tree_budget=4) for r in decoded({1: 9.0}) if r.method != "none"]  # type: ignore[type-var, attr-defined]
    found, info = confirmed(policy, [*tree, *decoded({8: 1.9, 1: 1.4})], measurements, new_ctx)
    assert info["speedup_meas"] == pytest.approx(1.4)
    one = next(e for e in found.evals if (e.workload, e.depth_k, e.batch_size) == ("all", 2, 1))
    assert info["al"] == one.al
    arm = next(a for a in found.arms if (a.workload, a.batch_size, a.tree_budget) == ("all", 1, None))
    assert info["speedup_pred_same_prompts"] == arm.speedup_pred is not None


def test_a_larger_batchs_depth_never_wins_where_the_smallest_drafts_nothing(
    chosen: Callable[..., DepthPolicy], measurements: Rows, new_ctx: NewCtx
) -> None:
    policy, info = confirmed(chosen(DEAR, CHEAP), decoded({1: 0.5, 8: 1.6}), measurements, new_ctx)
    assert {c.batch_size: c.depth_k for c in policy.choices if c.workload == "all"} == {1: 0, 8: 2}
    assert policy.winner is None and engine_settings(policy, ()) == {} and info["depth_k"] == 0
    assert policy.verdict == "do_not_speculate"


@pytest.mark.parametrize(("num_prompts", "passed"), [(1, False), (PROMPTS.decide - 1, False), (PROMPTS.decide, True)])
def test_an_interval_without_width_promotes_nothing(
    num_prompts: int, passed: bool, chosen: Callable[..., DepthPolicy], measurements: Rows, new_ctx: NewCtx
) -> None:
    policy, _ = confirmed(chosen(CHEAP, CHEAP), decoded({1: 1.6}, num_prompts), measurements, new_ctx)
    assert policy.gate is not None and policy.gate.passed is passed
    failed = {c.name: c.value for c in policy.gate.checks if not c.passed}
    assert failed == ({} if passed else {"prompts_measured": num_prompts})


def test_a_fault_of_prompt_lookup_is_not_the_drafters(
    chosen: Callable[..., DepthPolicy], measurements: Rows, new_ctx: NewCtx
) -> None:
    lookup = [make_request("ngram", 4, n, 65, 1.0, identical=False, tie=False) for n in range(40)]
    policy, _ = confirmed(chosen(CHEAP, CHEAP), [*decoded({1: 1.6}), *lookup], measurements, new_ctx)
    assert {(f.method, f.draft_key) for f in policy.flags if f.severity == "fault"} == {("ngram", "")}
    assert policy.verdict == "use" and policy.gate is not None and policy.gate.passed
    assert faults_of(policy, DRAFT) == []
    for method in ("", "none"):  # of the whole measurement, or of the plain decoding that all are compared with
        policy.flags[0] = dataclasses.replace(policy.flags[0], severity="fault", draft_key="", method=method)
        assert faults_of(policy, DRAFT) == [policy.flags[0]]


def test_a_tree_competes_with_the_chain_and_is_said_when_it_wins(choose: Callable[..., Policy]) -> None:
    maps = make_maps([0.6] * 6, num_prompts=64, num_tokens=200, seed=1)
    wide = [
        dataclasses.replace(m, tree_budget=12, k_max=4)
        for m in make_maps([0.85] * 4, num_prompts=64, num_tokens=200, seed=1)
    ]
    cells = make_cells(10.0, VERIFY_MS, DRAFT_MS)

    def tree_cells(cost: float) -> list[CostCell]:
        one = make_cells(10.0, [cost] * 4, [2.0] * 4)
        return [dataclasses.replace(c, tree_budget=12, num_rows=13) for c in one if c.depth_k == 4]

    cheap, dear = (choose([*maps, *wide], [*cells, *tree_cells(cost)]) for cost in (13.0, 40.0))
    (row,) = cheap.trees
    assert (row.depth_k, row.tree_budget) == (4, 12)
    assert row.speedup_pred == pytest.approx(row.al * 10.0 / 15.0)
    top = next(c for c in cheap.ranking if c.chosen)
    assert (top.tree_budget, top.depth_k) == (12, 4)
    assert "tree_predicted_faster" in {f.code for f in cheap.flags}
    assert next(c for c in dear.ranking if c.chosen).tree_budget is None
    assert "tree_predicted_faster" not in {f.code for f in dear.flags}
    # What is served stays a chain, and chains read as if no tree had been measured.
    assert cheap.winner is not None and cheap.winner.depth_k == dear.choices[0].depth_k
    assert {e.tree_budget for e in cheap.evals} == {None}


def test_a_drafter_that_only_trees_were_mapped_of_stands_back(choose: Callable[..., Policy]) -> None:
    """Its tree is not worth drafting, and nor is the other's chain: nothing is chosen, and nothing breaks."""
    other = "b" * 64
    maps = make_maps([0.1] * 4, num_prompts=64, num_tokens=100, seed=1)
    trees = [
        dataclasses.replace(m, tree_budget=12)
        for m in make_maps([0.3] * 4, num_prompts=64, num_tokens=100, seed=2, draft_key=other)
    ]
    cells = make_cells(10.0, [20.0] * 4, [3.0] * 4)
    wide = [
        dataclasses.replace(c, tree_budget=12, num_rows=13)
        for c in make_cells(10.0, [20.0] * 4, [3.0] * 4, draft_key=other)
        if c.depth_k == 4
    ]
    policy = choose([*maps, *trees], [*cells, *wide, *(c for c in cells if c.phase == "target_step")])
    assert policy.verdict == "do_not_speculate" and policy.winner is None
    assert {c.draft_key for c in policy.choices} == {DRAFT}


def contender(
    speed: float, noise: float, *, name: str, vocab: int | None = None, budget: int | None = None
) -> Contender:
    rng = np.random.default_rng(abs(hash((speed, noise))) % 2**32)
    estimate = Estimate(speed, speed + noise * rng.standard_normal(4000), np.full(64, noise / 8))
    return Contender(name, "eagle3", 3, budget, vocab, estimate, "use")


def test_the_smaller_vocabulary_or_tree_wins_what_is_as_good() -> None:
    near = [contender(1.500, 0.004, name="a", vocab=128_000), contender(1.495, 0.004, name="b", vocab=32_000)]
    assert next(c for c in rank(near, 0.01, 0.95) if c.chosen).draft_vocab == 32_000
    far = [contender(1.500, 0.004, name="a", vocab=128_000), contender(1.40, 0.004, name="b", vocab=32_000)]
    ranked = rank(far, 0.01, 0.95)
    assert next(c for c in ranked if c.chosen).draft_vocab == 128_000
    assert ranked[0].p_best == 1.0 and sum(c.p_best for c in ranked) == 1.0
    assert ranked[1].regret == pytest.approx(0.1 / 1.5, abs=0.01)
    trees = [contender(1.500, 0.004, name="a", budget=48), contender(1.495, 0.004, name="a", budget=16)]
    assert next(c for c in rank(trees, 0.01, 0.95) if c.chosen).tree_budget == 16
