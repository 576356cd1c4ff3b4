"""choose_stop: a rule is chosen where its gain is sure, and judged by prompts that it was not fitted to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from simulated_rows import DRAFT, make_cells, make_maps

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.policy import StopChoice, read_policy
from components.rows import AcceptanceMap, CostCell, DepthEval, read_rows
from components.speedup import choose_depth, choose_stop
from components.speedup.stop_fitting import answers_of, fit_rule, fixed_chains, replay_chains, rule_chains

Rows = Callable[[list[object]], Measurements]
NewCtx = Callable[..., Context]
DEPTH = 5
CELLS = make_cells(
    10.0, [11.2, 12.4, 13.6, 14.8, 16.0], [1.5, 2.3, 3.1, 3.9, 4.7], t_host=[0.1, 0.2, 0.2, 0.2, 0.2, 0.2], noise=0.01
)
READING = 0.02  # ms of one confidence


def read_cells(reading: float) -> list[CostCell]:
    return [
        dataclasses.replace(cell, phase="draft_read", median_ns=cell.median_ns + DEPTH * reading * 1e6)
        for cell in CELLS
        if (cell.phase, cell.depth_k) == ("draft", DEPTH)
    ]


NUM_READ = len(read_cells(READING))
CELLS += read_cells(READING)


def maps_of(says_much: bool, num_prompts: int = 24, seed: int = 0) -> list[AcceptanceMap]:
    """Maps of a drafter whose confidence is the chance of acceptance, or has nothing to do with it."""
    rng, maps = np.random.default_rng(seed), []
    for plain in make_maps([0.5] * DEPTH, num_prompts=num_prompts, num_tokens=160, seed=seed):
        confidence = rng.beta(0.4, 0.3, size=(plain.num_tokens - 1, DEPTH))
        chance = confidence if says_much else np.full_like(confidence, 0.57)
        accepted = np.cumprod(rng.random(chance.shape) < chance, axis=1).sum(axis=1).tolist()
        said = np.round(confidence, 4).tolist()
        maps.append(dataclasses.replace(plain, accepted=accepted, proxy_accepted=accepted, confidence=said))
    return maps


def run(
    measurements: Rows,
    new_ctx: NewCtx,
    maps: list[AcceptanceMap],
    ctx: Context | None = None,
    cells: Sequence[CostCell] = CELLS,
) -> StopChoice:
    acceptance, cost = [measurements([*maps])], [measurements([*cells])]
    policy = choose_depth(acceptance, cost, ctx=new_ctx())
    (choice,) = read_policy(choose_stop(policy, acceptance, cost, ctx=ctx or new_ctx()).path).stops
    return choice


def test_a_rule_is_chosen_where_confidence_tells_and_not_where_it_does_not(measurements: Rows, new_ctx: NewCtx) -> None:
    told, silent = run(measurements, new_ctx, maps_of(True)), run(measurements, new_ctx, maps_of(False))
    assert told.chosen and told.gain_lo > 1.02
    assert not silent.chosen and 0.98 < silent.gain < 1.01
    for choice in (told, silent):
        assert choice.draft_key == DRAFT and choice.num_prompts == 24
        assert choice.gain_lo <= choice.gain <= choice.gain_hi
        assert choice.gain == pytest.approx(choice.speedup / choice.speedup_fixed)
        assert 0.5 < choice.share_of_oracle < 1.0
    assert told.calibration_error < 0.03
    # Confidences that tell nothing are calibrated to what is accepted whatever they are.
    assert run(measurements, new_ctx, maps_of(False, 120)).calibration_error < 0.03


def test_a_rule_that_costs_more_than_it_gains_is_not_proposed(measurements: Rows, new_ctx: NewCtx) -> None:
    """What reading takes is paid: the same confidences, ten or fifty times as slow to read."""
    told = run(measurements, new_ctx, maps_of(True))
    slower, slowest = (
        run(measurements, new_ctx, maps_of(True), cells=[*CELLS[:-NUM_READ], *read_cells(times * READING)])
        for times in (10, 50)
    )
    assert told.gain > slower.gain > slowest.gain == 1.0
    assert slowest.rule.num_read == 0 and not slowest.chosen
    assert slower.reading_share == pytest.approx(10 * told.reading_share, rel=0.2)  # type: ignore[operator]


def test_the_gain_that_was_predicted_held_out_is_that_on_fresh_prompts(measurements: Rows, new_ctx: NewCtx) -> None:
    """The written rule, on 200 prompts nobody has seen, gains what its interval says."""
    choice, fresh = run(measurements, new_ctx, maps_of(True)), answers_of(maps_of(True, 200, seed=9))
    times = times_of(measurements, maps_of(True))
    fixed, stopped = (
        replay_chains(fresh, c, DEPTH) for c in (fixed_chains(choice.fixed_depth), rule_chains(choice.rule))
    )
    assert choice.gain_lo < stopped.rate(times) / fixed.rate(times) < choice.gain_hi


def times_of(measurements: Rows, maps: list[AcceptanceMap]) -> object:
    from components.speedup.choose import Evidence
    from components.speedup.prediction.predict import Rule
    from components.speedup.stop_choice import reading_time, round_times

    evidence = Evidence(maps, list(CELLS), None, None, {}, Rule(0.0, 0.95, 500, True), 0)
    assert reading_time(evidence, 1) == pytest.approx(READING)
    return round_times(evidence.costs(1), True, False)._replace(reading=reading_time(evidence, 1))


def test_the_fixed_depth_is_predicted_as_fast_as_choose_depth_predicts_it(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = maps_of(True)
    choice = run(measurements, new_ctx, maps)
    evals = read_rows(choose_depth([measurements([*maps])], [measurements([*CELLS])], ctx=new_ctx()).path, DepthEval)
    (predicted,) = {e.speedup_pred for e in evals if (e.workload, e.depth_k) == ("all", choice.fixed_depth)}
    assert choice.speedup_fixed == pytest.approx(predicted, rel=0.01)


def test_the_written_rule_is_fitted_to_all_prompts(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = maps_of(True)
    choice = run(measurements, new_ctx, maps)
    assert choice.rule == fit_rule(answers_of(maps), times_of(measurements, maps)).rule  # type: ignore[arg-type]


def test_the_rest_of_the_policy_stays_as_it_was(measurements: Rows, new_ctx: NewCtx) -> None:
    acceptance, cost = [measurements([*maps_of(True)])], [measurements([*CELLS])]
    policy = choose_depth(acceptance, cost, ctx=new_ctx())
    made: DepthPolicy = choose_stop(policy, acceptance, cost, ctx=new_ctx())
    assert dataclasses.replace(read_policy(made.path), stops=[]) == read_policy(policy.path)
    assert "Chains that end by confidence" in (made.path / "policy.md").read_text()
    again = choose_stop(made, acceptance, cost, ctx=new_ctx())
    assert len(read_policy(again.path).stops) == 1, "rules are replaced, not gathered"


def test_maps_without_confidence_are_refused_in_one_line(measurements: Rows, new_ctx: NewCtx) -> None:
    maps = [dataclasses.replace(m, confidence=[]) for m in maps_of(True)]
    with pytest.raises(UserError, match="no map holds confidences"):
        run(measurements, new_ctx, maps)


@pytest.mark.parametrize("fault", ["short", "narrow", "no probability"])
def test_torn_confidences_are_set_aside(fault: str, measurements: Rows, new_ctx: NewCtx) -> None:
    maps, ctx = maps_of(True), new_ctx()
    torn = {
        "short": maps[0].confidence[:-1],
        "narrow": [chain[:-1] for chain in maps[0].confidence],
        "no probability": [[2.0] * DEPTH for _ in maps[0].confidence],
    }[fault]
    choice = run(measurements, new_ctx, [dataclasses.replace(maps[0], confidence=torn), *maps[1:]], ctx)
    assert choice.num_prompts == 23
    assert "confidences" in (ctx.out / "set_aside.jsonl").read_text()
