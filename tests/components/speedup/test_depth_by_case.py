"""A depth for each workload, batch size and context; one for a mixture with its loss; trees and draft vocabularies."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated_rows import DRAFT, make_cells, make_maps

from components.contract import Context, Measurements, UserError
from components.engines.depth_settings import engine_settings
from components.policy import Policy, Winner, read_policy
from components.rows import AcceptanceMap, CostCell, DepthChoice, DepthEval, read_rows
from components.speedup import choose_depth
from components.speedup.policy_markdown import policy_text
from components.speedup.prediction.evidence import answers_near
from components.speedup.select import Contender, rank
from components.speedup.statistics.bootstrap import Estimate

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]

EASY, HARD = [0.95] * 6, [0.55] * 6
VERIFY, DRAFTS = [10.5 + 0.5 * k for k in range(6)], [0.5 + 0.5 * k for k in range(6)]


def two_workloads(num_prompts: int = 40) -> list[AcceptanceMap]:
    return [
        *make_maps(EASY, num_prompts=num_prompts, num_tokens=200, seed=1, workload="code"),
        *make_maps(HARD, num_prompts=num_prompts, num_tokens=200, seed=2, workload="chat"),
    ]


def at(cells: list[CostCell], **changes: object) -> list[CostCell]:
    return [dataclasses.replace(c, **changes) for c in cells]  # type: ignore[arg-type]


@pytest.fixture
def choose(measurements: Rows, new_ctx: NewCtx) -> Callable[..., Policy]:
    def run(maps: list, cells: list, **settings: object) -> Policy:
        made = choose_depth([measurements(maps)], [measurements(cells)], ctx=new_ctx(), **settings)  # type: ignore[arg-type]
        policy = read_policy(made.path)
        assert read_rows(made.path, DepthChoice) == [*policy.choices, *policy.contexts]
        assert read_rows(made.path, DepthEval) == [*policy.evals, *policy.trees]
        assert (made.path / "policy.md").read_text().startswith("# Depth policy")
        return policy

    return run


def told_to(policy: Policy) -> dict[str, Any]:
    """What engines are told, were they all able to load the drafter."""
    return engine_settings(policy, ())


def depths(policy: Policy) -> dict[str, int]:
    return {c.workload: c.depth_k for c in policy.choices}


def test_one_depth_for_all_says_what_it_loses(choose: Callable[..., Policy]) -> None:
    policy = choose(two_workloads(), make_cells(10.0, VERIFY, DRAFTS))
    assert depths(policy)["chat"] < depths(policy)["all"] <= depths(policy)["code"]
    (mixture,) = policy.mixtures
    assert not mixture.stated and mixture.shares == pytest.approx({"chat": 0.5, "code": 0.5})
    pooled = next(c for c in policy.choices if c.workload == "all")
    # Pooling prompts IS the mixture by their tokens: two ways to one number.
    assert mixture.speedup_pred == pytest.approx(pooled.speedup_pred)
    rows = {(e.workload, e.depth_k): e.speedup_pred for e in policy.evals}
    apart = 1 / sum(0.5 / rows[name, depths(policy)[name]] for name in ("chat", "code"))
    assert mixture.speedup_apart == pytest.approx(apart)
    assert pooled.loss == mixture.loss == pytest.approx(1 - pooled.speedup_pred / apart)
    assert 0.0 < mixture.loss < 0.1
    for choice in policy.choices:
        if choice.workload != "all":
            lost = 1 - rows[choice.workload, pooled.depth_k] / rows[choice.workload, choice.depth_k]
            assert choice.loss == pytest.approx(lost)


def test_a_stated_mixture_is_a_line_of_its_own_and_engines_serve_what_is_measured(
    choose: Callable[..., Policy],
) -> None:
    cells = make_cells(10.0, VERIFY, DRAFTS)
    found = {}
    for share in (0.02, 0.98):
        policy = choose(two_workloads(), cells, mixture={"code": share, "chat": 1 - share})
        row = next(c for c in policy.choices if c.workload == "mixture")
        (mixture,) = policy.mixtures
        assert mixture.stated and mixture.depth_k == row.depth_k and mixture.loss == row.loss
        assert policy.winner is not None and policy.winner.depth_k == depths(policy)["all"]
        assert told_to(policy)["vllm"]["speculative_config"]["num_speculative_tokens"] == depths(policy)["all"]
        assert f"one depth for the mixture stated (chat {1 - share:.0%}, code {share:.0%}) is" in policy_text(policy)
        found[share] = row.depth_k
    assert found[0.02] == depths(policy)["chat"] and found[0.98] == depths(policy)["code"]
    for wrong, said in (
        ({"poems": 1.0}, "poems not measured"),
        ({"code": 0.0}, "not all of them 0"),
        ({"code": math.nan}, "mixture: shares are numbers"),
        ({"code": 1.0, "chat": math.nan}, "mixture: shares are numbers"),
        ({"code": math.inf}, "mixture: shares are numbers"),
    ):
        with pytest.raises(UserError, match=said):
            choose(two_workloads(4), cells, mixture=wrong)


def test_a_dearer_batch_is_drafted_shallower_and_engines_are_told_the_ranges(choose: Callable[..., Policy]) -> None:
    maps = make_maps([0.8] * 6, num_prompts=64, num_tokens=200, seed=1)
    cells = make_cells(10.0, VERIFY, DRAFTS)
    steep = at(make_cells(20.0, [20.0 + 6 * k for k in range(1, 7)], [1.0 * k for k in range(1, 7)]), batch_size=8)
    hopeless = at(make_cells(30.0, [60.0 + 20 * k for k in range(6)], [2.0 * k for k in range(1, 7)]), batch_size=32)
    policy = choose(maps, [*cells, *steep, *hopeless])
    one, eight, many = (next(c for c in policy.choices if (c.workload, c.batch_size) == ("all", b)) for b in (1, 8, 32))
    assert one.depth_k > eight.depth_k > many.depth_k == 0
    assert many.verdict == "do_not_speculate"
    vllm = told_to(policy)["vllm"]["speculative_config"]
    assert vllm["num_speculative_tokens"] == one.depth_k
    ranges = [[1, 1, one.depth_k], [2, 8, eight.depth_k], [9, 32, 0]]
    assert vllm["num_speculative_tokens_per_batch_size"] == ranges
    schedule = told_to(policy)["tensorrt_llm"]["speculative_config"]["draft_len_schedule"]
    assert schedule == {"1": one.depth_k, "8": eight.depth_k, "32": 0}
    assert policy.winner == Winner(DRAFT, "eagle3", one.depth_k)


def test_each_context_length_has_its_own_choice(choose: Callable[..., Policy]) -> None:
    maps = make_maps([0.8] * 6, num_prompts=64, num_tokens=200, seed=1)
    near = at(make_cells(10.0, VERIFY, DRAFTS), kv_len=128)
    far = at(make_cells(30.0, [30.0 + 8 * k for k in range(1, 7)], [2.0 * k for k in range(1, 7)]), kv_len=4096)
    policy = choose(maps, [*near, *far])
    by_context = {c.kv_len: c for c in policy.contexts}
    assert by_context[4096].depth_k < by_context[128].depth_k
    assert all(c.kv_len is None for c in policy.choices)
    grid = told_to(policy)["vllm_by_context"]["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert grid == [[1, 1, 1, 128, by_context[128].depth_k], [1, 1, 129, 2**31 - 1, by_context[4096].depth_k]]
    only_near = choose(maps, near)
    assert by_context[128].speedup_pred == pytest.approx(only_near.choices[0].speedup_pred)
    assert only_near.contexts == [] and "vllm_by_context" not in told_to(only_near)


def test_a_context_is_judged_by_the_answers_near_it(choose: Callable[..., Policy]) -> None:
    def maps(p: float, prompt_tokens: int, num_prompts: int, workload: str) -> list[AcceptanceMap]:
        made = make_maps([p] * 6, num_prompts=num_prompts, num_tokens=200, seed=1, workload=workload)
        return [dataclasses.replace(m, prompt_tokens=prompt_tokens) for m in made]

    cells = [*at(make_cells(10.0, VERIFY, DRAFTS), kv_len=128), *at(make_cells(10.0, VERIFY, DRAFTS), kv_len=4096)]
    short, long = maps(0.85, 60, 40, "chat"), maps(0.3, 3000, 40, "papers")
    by_context = {c.kv_len: c for c in choose([*short, *long], cells).contexts}
    alone = {c.kv_len: c for c in choose(long, cells).contexts}
    assert by_context[128].depth_k > by_context[4096].depth_k
    assert by_context[4096].speedup_pred == pytest.approx(alone[4096].speedup_pred)
    assert "40 answers nearest to 4096" in by_context[4096].reasons[-1]
    few = {c.kv_len: c for c in choose([*short, *long[:7]], cells).contexts}
    assert "all prompts: 7 answers lie near 4096 tokens, 8 are asked" in few[4096].reasons[-1]


def test_an_answer_is_near_the_length_that_is_nearest_by_ratio() -> None:
    base = make_maps([0.5], num_prompts=3, num_tokens=100, seed=1)
    maps = [dataclasses.replace(m, prompt_tokens=n) for m, n in zip(base, (150, 950, None), strict=True)]
    assert answers_near(maps, 100, [100, 1000]) == maps[:1]
    assert answers_near(maps, 1000, [100, 1000]) == maps[1:2]


def test_a_tree_competes_with_the_chain_and_is_said_when_it_wins(choose: Callable[..., Policy]) -> None:
    maps = make_maps([0.6] * 6, num_prompts=64, num_tokens=200, seed=1)
    wide = [
        dataclasses.replace(m, tree_budget=12, k_max=4)
        for m in make_maps([0.85] * 4, num_prompts=64, num_tokens=200, seed=1)
    ]
    cells = make_cells(10.0, VERIFY, DRAFTS)

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


def entrant(speed: float, noise: float, *, name: str, vocab: int | None = None, budget: int | None = None) -> Contender:
    rng = np.random.default_rng(abs(hash((speed, noise))) % 2**32)
    estimate = Estimate(speed, speed + noise * rng.standard_normal(4000), np.full(64, noise / 8))
    return Contender(name, "eagle3", 3, budget, vocab, estimate, "use")


def test_the_smaller_vocabulary_or_tree_wins_what_is_as_good() -> None:
    near = [entrant(1.500, 0.004, name="a", vocab=128_000), entrant(1.495, 0.004, name="b", vocab=32_000)]
    assert next(c for c in rank(near, 0.01, 0.95) if c.chosen).draft_vocab == 32_000
    far = [entrant(1.500, 0.004, name="a", vocab=128_000), entrant(1.40, 0.004, name="b", vocab=32_000)]
    ranked = rank(far, 0.01, 0.95)
    assert next(c for c in ranked if c.chosen).draft_vocab == 128_000
    assert ranked[0].p_best == 1.0 and sum(c.p_best for c in ranked) == 1.0
    assert ranked[1].regret == pytest.approx(0.1 / 1.5, abs=0.01)
    trees = [entrant(1.500, 0.004, name="a", budget=48), entrant(1.495, 0.004, name="a", budget=16)]
    assert next(c for c in rank(trees, 0.01, 0.95) if c.chosen).tree_budget == 16


def test_the_policy_shows_three_and_seven_drafts_beside_the_chosen_depth(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps([0.8] * 7, num_prompts=64, num_tokens=200, seed=1)
    cells = make_cells(10.0, [10.5 + 0.5 * k for k in range(7)], [0.5 + 0.5 * k for k in range(7)])
    made = choose_depth([measurements(maps)], [measurements(cells)], ctx=new_ctx())
    text = (made.path / "policy.md").read_text()
    policy = read_policy(made.path)
    for e in policy.evals:
        if e.workload == "all" and e.depth_k in (3, 7):
            line = next(
                line for line in text.splitlines() if line.startswith(f"| {e.depth_k} (") and "usual on CPUs" in line
            )
            assert f"{e.speedup_pred:.2f}x" in line
    raw = (made.path / "policy.json").read_text()
    assert "engines" not in json.loads(raw), "what can load the drafter is known to a release"
    assert "--spec-draft-n-max" not in text + raw and "draft_predict_length" not in text + raw
    assert {"vllm", "llama_cpp", "mnn"} <= told_to(policy).keys()


def test_nothing_worth_drafting_tells_the_engines_nothing(choose: Callable[..., Policy]) -> None:
    policy = choose(
        make_maps([0.1] * 3, num_prompts=64, num_tokens=100, seed=1), make_cells(10.0, [20.0] * 3, [3.0] * 3)
    )
    assert told_to(policy) == {} and policy.winner is None
