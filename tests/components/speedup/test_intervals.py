"""Intervals hold the truth as often as they say, and only when prompts are what is resampled.

Simulated prompts: each has an acceptance rate of its own (Beta 6, 3) and a length of its own, as real ones do; the
truth is the ratio of expectations, summed in closed form. Seeds are fixed, so a failure is a change of the code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from components.speedup.bootstrap import Estimate, Floats, draw_weights, pooled_ratio, ratio_draws
from components.speedup.cost_curve import cost_curve
from components.speedup.costs import CostTable, StepTimes, known_table
from components.speedup.evaluate import Rule, predict

DEPTH = 3
KEPT = np.arange(DEPTH + 1)  # drafts that a round may keep
COST, NUM_PROCESSES, SPREAD = (10.0, 12.0, 2.0), 3, 0.02  # ms of a plain step, a verification, the drafts
RULE = Rule(tolerance=0.01, confidence=0.95, num_draws=1000, include_host=True)


class Study(NamedTuple):
    """One simulated study of independent prompts."""

    tokens: Floats  # [prompts]
    rounds: Floats  # [prompts]
    outcomes: Floats  # [prompts, DEPTH + 1]: rounds that kept 0, 1, ... drafts


def simulate(num_prompts: int, rng: np.random.Generator) -> Study:
    p = rng.beta(6.0, 3.0, size=num_prompts)[:, None]
    rounds = rng.integers(32, 257, size=num_prompts)
    shares = np.concatenate([(1 - p) * p ** KEPT[:-1], p**DEPTH], axis=1)
    outcomes = rng.multinomial(rounds, shares).astype(np.float64)
    return Study(outcomes @ (KEPT + 1.0), rounds.astype(np.float64), outcomes)


def true_length() -> float:
    """1 + E[p] + E[p^2] + E[p^3] of a Beta(6, 3); lengths are independent of p, so they cancel."""
    moments = np.cumprod([(6.0 + i) / (9.0 + i) for i in range(DEPTH)])
    return 1.0 + float(moments.sum())


def timed(rng: np.random.Generator) -> CostTable:
    """Three processes, each with its own plain step and its own round."""
    logs = np.log([COST[0], COST[1] + COST[2]])[:, None] + SPREAD * rng.standard_normal((2, NUM_PROCESSES))
    curve = cost_curve([DEPTH], (logs[1] - logs[0])[None, :])
    plain, round_ = 1.0, float(np.exp(curve.log_ratio[0]))
    table = known_table([0, DEPTH], StepTimes(np.array(plain), np.array([plain, round_]), np.zeros(2), np.zeros(2)))
    nothing = np.zeros((1, curve.process.shape[1]))
    return table._replace(
        process=np.concatenate([nothing, curve.process]),
        process_free=np.array([np.inf, curve.free[0]]),
        num_shared=NUM_PROCESSES,
        num_processes=NUM_PROCESSES,
    )


def test_intervals_over_prompts_cover_95_percent_and_over_rounds_do_not() -> None:
    """1,000 studies of 200 prompts in 3 processes: acceptance length and predicted speedup, drawn with both.

    A true coverage of 95 % lies in 93 to 97 % but for once in 250 sets of seeds; the fixed ones give COVERED,
    and 25.9 % where rounds are resampled.
    """
    truth = true_length()
    speedup = truth * COST[0] / (COST[1] + COST[2])
    covered = {"al": 0, "speedup": 0, "over rounds": 0}
    for number in range(1000):
        rng = np.random.default_rng([7, number])
        study = simulate(200, rng)
        plain = np.stack([study.tokens, study.tokens], axis=1)
        speeds = predict(plain, np.stack([study.tokens, study.rounds], axis=1), timed(rng), "all", RULE, number)
        for name, estimate, true in (("al", speeds.al[1], truth), ("speedup", speeds.speedup[1], speedup)):
            low, high = estimate.interval()
            covered[name] += low <= true <= high
        pooled = study.outcomes.sum(axis=0)
        rounds = rng.multinomial(int(pooled.sum()), pooled / pooled.sum(), size=RULE.num_draws)
        length = Estimate(
            float(pooled @ (KEPT + 1.0) / pooled.sum()), rounds @ (KEPT + 1.0) / pooled.sum(), np.zeros(0)
        )
        low, high = length.interval()
        covered["over rounds"] += low <= truth <= high
    assert 930 <= covered["al"] <= 970, covered
    assert 930 <= covered["speedup"] <= 970, covered
    assert covered["over rounds"] < 500, covered  # rounds of one prompt are alike: the same check fails by far


def test_few_prompts_get_wider_intervals_not_wrong_ones() -> None:
    """500 studies of 8 prompts: plain percentiles cover 86 %, the bias-corrected and widened interval 92 %."""
    truth, mine, percentile = true_length(), 0, 0
    for number in range(500):
        rng = np.random.default_rng([8, number])
        study = simulate(8, rng)
        estimate = pooled_ratio(draw_weights(8, 1000, rng), study.tokens, study.rounds)
        low, high = estimate.interval()
        mine += low <= truth <= high
        low, high = np.quantile(estimate.draws, [0.025, 0.975])
        percentile += low <= truth <= high
    assert mine >= 455 and percentile <= 445, (mine, percentile)


def test_skew_moves_both_ends_of_an_interval() -> None:
    """A ratio with a long upper tail: a percentile interval ends too low on both sides."""
    rng = np.random.default_rng(3)
    above = rng.lognormal(0.0, 1.0, size=40)
    estimate = pooled_ratio(draw_weights(40, 4000, rng), above, np.ones(40))
    low, high = estimate.interval()
    plain = np.quantile(estimate.draws, [0.025, 0.975])
    assert low > plain[0] and high > plain[1]


def test_draws_are_multinomial_and_a_ratio_is_the_pooled_one() -> None:
    weights = draw_weights(50, 400, np.random.default_rng(0))
    assert weights.shape == (400, 50) and (weights.sum(axis=1) == 50).all()
    assert weights.mean() == 1.0 and weights.var() == pytest.approx(1.0 - 1 / 50, abs=0.05)
    above, below = np.arange(1.0, 51.0), np.full(50, 2.0)
    both = ratio_draws(weights, np.stack([above, below], axis=1), np.stack([below, above], axis=1))
    assert both[:, 0] == pytest.approx((weights @ above) / (weights @ below))
    assert both[:, 1] == pytest.approx(1.0 / both[:, 0])


def test_influence_is_the_slope_of_the_ratio() -> None:
    """Against the change that one more copy of a prompt makes, and the spread that the bootstrap finds."""
    rng = np.random.default_rng(1)
    above, below = rng.uniform(50, 150, 60), rng.uniform(20, 60, 60)
    estimate = pooled_ratio(draw_weights(60, 4000, rng), above, below)
    step = 1e-6
    moved = (above.sum() + step * above[0]) / (below.sum() + step * below[0])
    assert estimate.influence[0] == pytest.approx((moved - estimate.value) / step, rel=1e-3)
    assert float(np.sqrt((estimate.influence**2).sum())) == pytest.approx(float(estimate.draws.std()), rel=0.05)
    quotient = estimate.over(pooled_ratio(draw_weights(60, 4000, np.random.default_rng(1)), below, above))
    assert quotient.value == pytest.approx(estimate.value**2)


def test_what_does_not_vary_has_no_width() -> None:
    estimate = pooled_ratio(draw_weights(5, 200, np.random.default_rng(0)), np.full(5, 6.0), np.full(5, 3.0))
    assert estimate.interval() == (2.0, 2.0)
