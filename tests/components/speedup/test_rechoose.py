"""After measuring, the depth follows both prediction and measurement; where they contradict each other, it is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from simulated_rows import DRAFT, make_cells, make_maps, make_request

from components.contract import Context, DepthPolicy, Measurements
from components.engines.depth_settings import engine_settings
from components.policy import Policy, Winner, read_policy
from components.rows import AcceptanceMap, CostCell
from components.speedup import choose_depth, confirm_depth
from components.speedup.prediction.replay import count
from components.speedup.rechoose import MeasuredDepth, PredictedDepth, combine

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]

P, PLAIN = [0.8, 0.75, 0.7, 0.6], 10.0
VERIFY, DRAFTS = [10.5, 11.0, 11.5, 12.0], [1.0, 2.0, 3.0, 4.0]
NUM_PROMPTS = 24


def maps(draft_key: str = DRAFT, method: str = "eagle3") -> list[AcceptanceMap]:
    return make_maps(P, num_prompts=NUM_PROMPTS, num_tokens=96, seed=1, spread=0.05, draft_key=draft_key, method=method)


def decoded(
    factors: Mapping[int, float],
    *,
    processes: int = 3,
    apart: float = 0.003,
    draft_key: str = DRAFT,
    method: str = "eagle3",
) -> list[object]:
    """Plain decoding and depths of one drafter in fresh processes: a round costs `factor` times what was predicted."""
    rng = np.random.default_rng(5)
    rows: list[object] = []
    for process in range(1, processes + 1):
        pace = np.exp(0.1 * rng.standard_normal())
        favour = {depth: np.exp(apart * rng.standard_normal()) for depth in factors}
        for n, m in enumerate(maps(draft_key, method)):
            if not draft_key.startswith("z"):
                rows.append(make_request("none", 0, n, 96, 95 * PLAIN * pace / 1e3, process=process))
            for depth, factor in factors.items():
                counted = count(m.accepted, depth)
                cycle = (VERIFY[depth - 1] + DRAFTS[depth - 1]) * factor * favour[depth] * pace / 1e3
                rows.append(
                    make_request(
                        method,
                        depth,
                        n,
                        96,
                        counted.rounds * cycle * (1 + 0.003 * rng.standard_normal()),
                        process=process,
                        draft_key=draft_key,
                        num_rounds=counted.rounds,
                        num_drafted=depth * counted.rounds,
                        num_accepted=counted.full_accepted,
                    )
                )
    return rows


@pytest.fixture
def chosen(measurements: Rows, new_ctx: NewCtx) -> DepthPolicy:
    """Predicted: 1.57x at depth 1, 1.84x, 1.99x at depth 3, 1.98x."""
    cells = make_cells(PLAIN, VERIFY, DRAFTS, noise=0.01, seed=4)
    policy = choose_depth([measurements(list(maps()))], [measurements(list(cells))], ctx=new_ctx())
    assert policy.info["depth_k"] == 3 and policy.info["verdict"] == "use"
    return policy


@pytest.fixture
def confirm(measurements: Rows, new_ctx: NewCtx) -> Callable[..., Policy]:
    def run(policy: DepthPolicy, rows: list[object], **settings: object) -> Policy:
        return read_policy(confirm_depth(policy, measurements(rows), ctx=new_ctx(), **settings).path)  # type: ignore[arg-type]

    return run


def test_the_depth_that_both_agree_on_stands(chosen: DepthPolicy, confirm: Callable[..., Policy]) -> None:
    policy = confirm(chosen, decoded({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}))
    assert policy.winner == Winner(DRAFT, "eagle3", 3)
    assert policy.verdict == "use" and policy.gate is not None and policy.gate.passed
    codes = {f.code for f in policy.flags}
    assert not codes & {"undecided_contradiction", "prediction_overruled", "one_session"}
    assert all(arm.num_processes == 3 for arm in policy.arms)


def test_the_depth_follows_a_measurement_that_is_surer_than_the_prediction(
    chosen: DepthPolicy, confirm: Callable[..., Policy]
) -> None:
    """Depths 3 and 4 take 11 % longer than predicted: depth 2 is taken, and all that is said and told follows."""
    policy = confirm(chosen, decoded({1: 1.0, 2: 1.0, 3: 1.11, 4: 1.11}))
    assert policy.winner is not None and policy.winner.depth_k == 2
    choice = next(c for c in policy.choices if c.workload == "all")
    row = next(e for e in policy.evals if (e.workload, e.depth_k) == ("all", 2))
    assert (choice.depth_k, choice.speedup_pred, choice.speedup_meas) == (2, row.speedup_pred, row.speedup_meas)
    (flag,) = [f for f in policy.flags if f.code == "depth_changed"]
    assert flag.value == 2 and "instead of 3" in flag.detail
    told = engine_settings(policy, ())
    assert told["vllm"]["speculative_config"]["num_speculative_tokens"] == 2
    assert choice.p_beats_no_spec is not None and choice.p_beats_no_spec > 0.99


def test_a_contradiction_is_undecided_until_the_measurement_settles_it(
    chosen: DepthPolicy, confirm: Callable[..., Policy]
) -> None:
    """Depth 1, which is predicted to be a fifth slower than depth 3, measures a quarter faster. In one process that
    may be its layout; three that agree overrule the prediction, and say so."""
    odd = {1: 0.95, 2: 1.2, 3: 1.5}
    for rows in (decoded(odd, processes=1), decoded(odd, processes=3, apart=0.05)):
        policy = confirm(chosen, rows)
        (flag,) = [f for f in policy.flags if f.code == "undecided_contradiction"]
        assert "measure depths 1 and 3 of eagle3 more" in flag.detail
        assert policy.verdict == "undecided" and any("measure depths 1 and 3" in reason for reason in policy.reasons)
    settled = confirm(chosen, decoded(odd, processes=4, apart=0.002))
    assert "undecided_contradiction" not in {f.code for f in settled.flags}
    assert "prediction_overruled" in {f.code for f in settled.flags}
    assert settled.verdict == "use" and settled.winner is not None and settled.winner.depth_k == 1


def test_one_process_is_said_to_be_one(chosen: DepthPolicy, confirm: Callable[..., Policy]) -> None:
    policy = confirm(chosen, decoded({2: 1.0, 3: 1.0}, processes=1))
    (flag,) = [f for f in policy.flags if f.code == "one_session"]
    assert "one process" in flag.detail and "leave out" in flag.detail


def test_a_depth_that_the_prediction_did_not_dare_is_used_once_it_is_measured_faster(
    measurements: Rows, new_ctx: NewCtx, confirm: Callable[..., Policy]
) -> None:
    cells = make_cells(PLAIN, [v * 2.0 for v in VERIFY], [d * 2.0 for d in DRAFTS], noise=0.03, seed=4)
    policy = choose_depth([measurements(list(maps()))], [measurements(list(cells))], ctx=new_ctx())
    assert policy.info["depth_k"] == 0
    found = confirm(policy, decoded({2: 1.3, 3: 1.3}), max_prediction_gap=10.0)
    assert found.winner is not None and found.winner.depth_k == 3 and found.verdict == "use"


def test_the_gap_is_judged_with_costs_of_the_same_moment(chosen: DepthPolicy, confirm: Callable[..., Policy]) -> None:
    """The machine is busier end to end than when step costs were timed, and slower in drafting than in plain steps."""
    requests = decoded({1: 1.25, 2: 1.25, 3: 1.25})
    cells: list[CostCell] = make_cells(PLAIN, [v * 1.25 for v in VERIFY[:3]], [d * 1.25 for d in DRAFTS[:3]])

    def gap(rows: list[object]) -> float:
        policy = confirm(chosen, rows)
        assert policy.gate is not None
        return float(next(c.value for c in policy.gate.checks if c.name == "prediction_gap"))

    assert gap(requests) == pytest.approx(0.25, abs=0.03)
    assert gap([*requests, *cells]) < 0.02
    # Costs of other depths, of a tree or of another batch say nothing about it.
    others = [dataclasses.replace(c, batch_size=8) for c in cells]
    assert gap([*requests, *others]) == pytest.approx(0.25, abs=0.03)


def test_drafters_are_ranked_by_what_was_measured_in_pairs(
    measurements: Rows, new_ctx: NewCtx, confirm: Callable[..., Policy]
) -> None:
    """Two drafters that are predicted alike; the second measures 6 % faster in every process."""
    other = "z" * 64
    cells = [
        *make_cells(PLAIN, VERIFY, DRAFTS, noise=0.01, seed=4),
        *make_cells(PLAIN, VERIFY, DRAFTS, noise=0.01, seed=6, draft_key=other, method="mtp"),
    ]
    both = [measurements(list(maps())), measurements(list(maps(other, "mtp")))]
    policy = choose_depth(both, [measurements(list(cells))], ctx=new_ctx())
    rows = [*decoded({2: 1.0, 3: 1.0}), *decoded({2: 0.94, 3: 0.94}, draft_key=other, method="mtp")]
    found = confirm(policy, rows)
    assert found.winner is not None and found.winner.method == "mtp"
    assert len({round(c.t_target_ms, 9) for c in found.evals}) == 1, "one baseline for both"


def test_the_posterior_weighs_by_precision_and_carries_an_offset_over() -> None:
    """Three depths predicted at 1.0, 1.1, 1.2; all that were run are a tenth slower, and so the third is too."""
    draws = 4000
    rng = np.random.default_rng(0)
    predicted = [
        PredictedDepth("d", k, np.zeros(draws), -np.log(1.0 + 0.1 * (k - 1)) + 0.005 * rng.standard_normal(draws))
        for k in (1, 2, 3)
    ]
    sure = [
        MeasuredDepth("d", k, np.log(0.9 * (1.0 + 0.1 * (k - 1))) + 0.005 * rng.standard_normal(draws)) for k in (1, 2)
    ]
    mean = combine(predicted, sure, 0).mean(axis=0)
    assert mean[:2] == pytest.approx([0.9, 0.99], rel=0.01)
    assert mean[2] == pytest.approx(1.2 * 0.9, rel=0.03), "the model is off alike at every depth of a drafter"
    vague = [one._replace(speed_of_round=one.speed_of_round + rng.standard_normal(draws)) for one in sure]
    assert combine(predicted, vague, 0).mean(axis=0) == pytest.approx([1.0, 1.1, 1.2], rel=0.02)
    spread = combine(predicted, sure, 0).std(axis=0)
    assert spread[0] < 0.01 < spread[2]
    assert np.median(combine(predicted, [], 0), axis=0) == pytest.approx([1.0, 1.1, 1.2], rel=0.01)
