"""Choosing a depth: the worked example, invariances, refusals, honest intervals; each batch size and context apart."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import pytest
from simulated_rows import DRAFT, DRAFT_MS, VERIFY_MS, changed, make_cells, make_maps

from components.contract import Context, Measurements, UserError
from components.engines.depth_settings import engine_settings
from components.policy import Policy, Winner, read_policy
from components.rows import AcceptanceMap, DepthChoice, DepthEval, QualityFlag, read_rows
from components.speedup import choose_depth
from components.speedup.choose import answers_near
from components.speedup.prediction.replay import replay_counts

P, VERIFY, HOST_FREE_DRAFT = [0.80, 0.74, 0.67], [90.0, 104.0, 117.0], [8.0, 14.0, 22.0]
Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]


def run(measurements: Rows, new_ctx: NewCtx, maps: list, cells: list, **settings: object) -> Policy:
    out = choose_depth([measurements(maps)], [measurements(cells)], ctx=new_ctx(), **settings)  # type: ignore[arg-type]
    return read_policy(out.path)


def pooled(policy: Policy) -> list[DepthEval]:
    return [e for e in policy.evals if e.workload == "all"]


def test_worked_example_from_rows(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=64, num_tokens=3000, seed=1)
    policy = run(measurements, new_ctx, maps, make_cells(76.0, VERIFY, HOST_FREE_DRAFT))
    rows = pooled(policy)
    assert [r.al for r in rows[1:]] == pytest.approx([1.80, 2.39, 2.79], abs=0.02)
    assert [r.speedup_pred for r in rows[1:]] == pytest.approx([1.40, 1.54, 1.52], abs=0.015)
    assert policy.winner == Winner(DRAFT, "eagle3", 2)
    assert policy.verdict == "use"
    for r in rows:
        assert r.speedup_pred == pytest.approx(r.al * r.t_target_ms / (r.t_verify_ms + r.t_draft_ms))
        assert r.pred_lo <= r.speedup_pred <= r.pred_hi
    assert sum(r.p_best for r in rows) == pytest.approx(1.0)
    assert not [f for f in policy.flags if f.severity != "info"]


def test_a_map_of_one_live_run_speaks_for_its_own_depth_alone(measurements: Rows, new_ctx: NewCtx) -> None:
    """lookahead guesses from its earlier passes: a shallower run would have had others."""
    maps = make_maps([0.9, 0.9, 0.1], num_prompts=20, num_tokens=96, seed=1, method="lookahead")
    policy = run(measurements, new_ctx, maps, make_cells(76.0, VERIFY, HOST_FREE_DRAFT, method="lookahead"))
    assert [row.depth_k for row in pooled(policy)] == [0, 3]
    assert {row.depth_k for row in policy.acceptance} == {0, 3}


def test_rows_on_disk_equal_the_policy(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=6, num_tokens=64, seed=1)
    out = choose_depth([measurements(maps)], [measurements(make_cells(76.0, VERIFY, HOST_FREE_DRAFT))], ctx=new_ctx())
    policy = read_policy(out.path)
    assert read_rows(out.path, DepthEval) == policy.evals
    assert read_rows(out.path, DepthChoice) == policy.choices
    assert read_rows(out.path, QualityFlag) == policy.flags
    assert {c.workload for c in policy.choices} == {"all", "code"}
    assert out.info["depth_k"] == policy.choices[0].depth_k


def test_choice_ignores_the_unit_of_time_and_the_order_of_prompts(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=20, num_tokens=96, seed=2, spread=0.1)
    cells = make_cells(76.0, VERIFY, HOST_FREE_DRAFT, noise=0.03, seed=3)
    once = run(measurements, new_ctx, maps, cells)
    shuffled = [maps[i] for i in np.random.default_rng(0).permutation(len(maps))]
    assert anonymous(run(measurements, new_ctx, shuffled, cells)) == anonymous(once)
    slower = [dataclasses.replace(c, median_ns=c.median_ns * 4.0) for c in cells]
    for a, b in zip(pooled(run(measurements, new_ctx, maps, slower)), pooled(once), strict=True):
        assert (a.depth_k, a.al) == (b.depth_k, b.al)
        assert (a.speedup_pred, a.pred_lo, a.p_best) == pytest.approx((b.speedup_pred, b.pred_lo, b.p_best))


def anonymous(policy: Policy) -> list[DepthEval]:
    """Pooled rows without what names the artifact they came from."""
    return [dataclasses.replace(e, selection_id="") for e in pooled(policy)]


@pytest.mark.parametrize("depth_cost", [1.0, 30.0])
def test_nothing_accepted_means_do_not_speculate(depth_cost: float, measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps([0.0, 0.0, 0.0], num_prompts=40, num_tokens=64, seed=1)
    policy = run(measurements, new_ctx, maps, make_cells(76.0, [78.0, 80.0, 82.0], [depth_cost] * 3))
    assert policy.verdict == "do_not_speculate"
    assert policy.winner is None
    assert all(c.depth_k == 0 and c.speedup_pred == 1.0 for c in policy.choices)
    assert "nothing_accepted" in {f.code for f in policy.flags}


def test_a_coin_toss_is_undecided(measurements: Rows, new_ctx: NewCtx) -> None:
    """Half the prompts gain, half lose: neither "use" nor "do not" is supported."""
    maps = make_maps([0.26], num_prompts=12, num_tokens=48, seed=4, spread=0.15)
    al = float(replay_counts(maps, [1]).tokens.sum() / replay_counts(maps, [1]).rounds.sum())
    policy = run(measurements, new_ctx, maps, make_cells(76.0, [76.0 * al * 0.99], [0.5]))
    assert policy.verdict == "undecided"
    assert policy.choices[0].depth_k == 0


def test_a_round_cheaper_than_a_plain_step_is_invalid(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=40, num_tokens=96, seed=1)
    policy = run(measurements, new_ctx, maps, make_cells(100.0, [60.0, 70.0, 80.0], [4.0, 8.0, 12.0]))
    assert policy.verdict == "invalid"
    assert "bad_baseline" in {f.code for f in policy.flags}


def test_host_time_counts_on_both_sides_or_not_at_all(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=10, num_tokens=200, seed=1)
    cells = make_cells(76.0, VERIFY, HOST_FREE_DRAFT, t_host=[1.0, 2.0, 3.0, 4.0])
    row = pooled(run(measurements, new_ctx, maps, cells))[2]
    assert row.speedup_pred == pytest.approx(row.al * 77.0 / (104.0 + 14.0 + 3.0))
    bare = pooled(run(measurements, new_ctx, maps, cells, include_host=False))[2]
    assert bare.speedup_pred == pytest.approx(bare.al * 76.0 / 118.0)
    assert row.cost_ratio == bare.cost_ratio == pytest.approx(118.0 / 76.0)


def test_the_fastest_plain_kernel_is_the_baseline(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=10, num_tokens=200, seed=1)
    cells = make_cells(76.0, VERIFY, HOST_FREE_DRAFT)
    slow = [
        dataclasses.replace(c, kernel="plain", median_ns=c.median_ns * 2) for c in cells if c.phase == "target_step"
    ]
    assert {e.t_target_ms for e in pooled(run(measurements, new_ctx, maps, cells + slow))} == {76.0}


def test_maps_that_cannot_be_replayed_are_set_aside(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = make_maps(P, num_prompts=5, num_tokens=64, seed=1)
    broken = [
        dataclasses.replace(maps[0], prompt_id="short", accepted=[1, 1]),
        dataclasses.replace(maps[0], prompt_id="wild", accepted=[9] * 63),
        dataclasses.replace(maps[0], prompt_id="empty", num_tokens=1),
    ]
    ctx = new_ctx()
    cost = measurements(make_cells(76.0, VERIFY, HOST_FREE_DRAFT))
    out = choose_depth([measurements(maps + broken)], [cost], ctx=ctx)
    assert len((out.path / "set_aside.jsonl").read_text().splitlines()) == 3
    assert read_policy(out.path).acceptance[0].num_prompts == 5


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0, 0.0])
def test_times_that_no_clock_gives_are_set_aside(wrong: float, measurements: Rows, new_ctx: NewCtx) -> None:
    maps, cells = make_maps(P, num_prompts=5, num_tokens=64, seed=1), make_cells(76.0, VERIFY, HOST_FREE_DRAFT)
    without = run(measurements, new_ctx, maps, [c for c in cells if (c.phase, c.depth_k) != ("verify", 2)])
    broken = [dataclasses.replace(c, median_ns=wrong) if (c.phase, c.depth_k) == ("verify", 2) else c for c in cells]
    out = choose_depth([measurements(maps)], [measurements(broken)], ctx=new_ctx())  # type: ignore[arg-type]
    assert [e.depth_k for e in pooled(read_policy(out.path))] == [0, 1, 3] == [e.depth_k for e in pooled(without)]
    assert len((out.path / "set_aside.jsonl").read_text().splitlines()) == 9  # one a block
    nothing = [dataclasses.replace(c, median_ns=wrong) if c.phase == "target_step" else c for c in cells]
    with pytest.raises(UserError, match="target_step cells missing"):
        run(measurements, new_ctx, maps, nothing)


@pytest.mark.parametrize(
    ("maps", "cells", "message"),
    [
        ([], make_cells(1.0, [1.0], [1.0]), "no usable acceptance maps"),
        (make_maps(P, num_prompts=2, num_tokens=9, seed=1), [], "no draft times for eagle3"),
        (make_maps(P, num_prompts=2, num_tokens=9, seed=1) * 2, make_cells(1.0, [1.0], [1.0]), "twice"),
        (
            make_maps(P, num_prompts=2, num_tokens=9, seed=1),
            [c for c in make_cells(1.0, [1.0], [1.0]) if c.phase != "target_step"],
            "target_step",
        ),
    ],
)
def test_missing_evidence_is_one_line(
    maps: list, cells: list, message: str, measurements: Rows, new_ctx: NewCtx
) -> None:
    with pytest.raises(UserError, match=message) as error:
        run(measurements, new_ctx, maps, cells)
    assert "\n" not in str(error.value)


def test_choosing_is_quick(measurements: Rows, new_ctx: NewCtx) -> None:
    """Two drafters, 8 depths, 64 prompts, 2000 draws: CPU time, so that a busy machine does not fail it."""
    deep = [0.8] * 8
    cells = make_cells(10.0, [11.0 + k for k in range(8)], [1.0 + k for k in range(8)], noise=0.02)
    sources = []
    for key in ("a" * 64, "b" * 64):
        maps = make_maps(deep, num_prompts=64, num_tokens=96, seed=1, draft_key=key)
        sources.append((measurements(maps), measurements([dataclasses.replace(c, draft_key=key) for c in cells])))
    start = time.process_time()
    choose_depth([a for a, _ in sources], [c for _, c in sources], ctx=new_ctx())
    assert time.process_time() - start < 5.0


def test_a_dearer_batch_is_drafted_shallower_and_engines_are_told_the_ranges(choose: Callable[..., Policy]) -> None:
    maps = make_maps([0.8] * 6, num_prompts=64, num_tokens=200, seed=1)
    cells = make_cells(10.0, VERIFY_MS, DRAFT_MS)
    steep = changed(make_cells(20.0, [20.0 + 6 * k for k in range(1, 7)], [1.0 * k for k in range(1, 7)]), batch_size=8)
    hopeless = changed(
        make_cells(30.0, [60.0 + 20 * k for k in range(6)], [2.0 * k for k in range(1, 7)]), batch_size=32
    )
    policy = choose(maps, [*cells, *steep, *hopeless])
    one, eight, many = (next(c for c in policy.choices if (c.workload, c.batch_size) == ("all", b)) for b in (1, 8, 32))
    assert one.depth_k > eight.depth_k > many.depth_k == 0
    assert many.verdict == "do_not_speculate"
    vllm = engine_settings(policy, ())["vllm"]["speculative_config"]
    assert vllm["num_speculative_tokens"] == one.depth_k
    ranges = [[1, 1, one.depth_k], [2, 8, eight.depth_k], [9, 32, 0]]
    assert vllm["num_speculative_tokens_per_batch_size"] == ranges
    schedule = engine_settings(policy, ())["tensorrt_llm"]["speculative_config"]["draft_len_schedule"]
    assert schedule == {"1": one.depth_k, "8": eight.depth_k, "32": 0}
    assert policy.winner == Winner(DRAFT, "eagle3", one.depth_k)


def test_each_context_length_has_its_own_choice(choose: Callable[..., Policy]) -> None:
    maps = make_maps([0.8] * 6, num_prompts=64, num_tokens=200, seed=1)
    near = changed(make_cells(10.0, VERIFY_MS, DRAFT_MS), kv_len=128)
    far = changed(make_cells(30.0, [30.0 + 8 * k for k in range(1, 7)], [2.0 * k for k in range(1, 7)]), kv_len=4096)
    policy = choose(maps, [*near, *far])
    by_context = {c.kv_len: c for c in policy.contexts}
    assert by_context[4096].depth_k < by_context[128].depth_k
    assert all(c.kv_len is None for c in policy.choices)
    grid = engine_settings(policy, ())["vllm_by_context"]["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert grid == [[1, 1, 1, 128, by_context[128].depth_k], [1, 1, 129, 2**31 - 1, by_context[4096].depth_k]]
    only_near = choose(maps, near)
    assert by_context[128].speedup_pred == pytest.approx(only_near.choices[0].speedup_pred)
    assert only_near.contexts == [] and "vllm_by_context" not in engine_settings(only_near, ())


def test_a_context_is_judged_by_the_answers_near_it(choose: Callable[..., Policy]) -> None:
    def maps(p: float, prompt_tokens: int, num_prompts: int, workload: str) -> list[AcceptanceMap]:
        made = make_maps([p] * 6, num_prompts=num_prompts, num_tokens=200, seed=1, workload=workload)
        return [dataclasses.replace(m, prompt_tokens=prompt_tokens) for m in made]

    cells = [
        *changed(make_cells(10.0, VERIFY_MS, DRAFT_MS), kv_len=128),
        *changed(make_cells(10.0, VERIFY_MS, DRAFT_MS), kv_len=4096),
    ]
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


def test_nothing_worth_drafting_tells_the_engines_nothing(choose: Callable[..., Policy]) -> None:
    policy = choose(
        make_maps([0.1] * 3, num_prompts=64, num_tokens=100, seed=1), make_cells(10.0, [20.0] * 3, [3.0] * 3)
    )
    assert engine_settings(policy, ()) == {} and policy.winner is None
