"""Intervals hold the truth as often as they say, and only when prompts are what is resampled.

Simulated prompts: each has an acceptance rate of its own (Beta 6, 3) and a length of its own, as real ones do; the
truth is the ratio of expectations, summed in closed form. Seeds are fixed, so a failure is a change of the code.

Student's quantiles equal printed tables; in paired draws the smallest that is as good as the best is taken.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.speedup.bootstrap import (
    NEARLY_NORMAL,
    Estimate,
    Floats,
    draw_weights,
    losses,
    near_best,
    p_best,
    pooled_ratio,
    ratio_draws,
    student_cdf,
    student_quantile,
)

DEPTH = 3
KEPT = np.arange(DEPTH + 1)  # drafts that a round may keep
NUM_DRAWS = 1000
NOTHING: Floats = np.zeros(0)


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


def test_intervals_over_prompts_cover_95_percent_and_over_rounds_do_not() -> None:
    """600 studies of 200 prompts. A true coverage of 95 % lies in 93 to 97 % but for once in 40 sets of seeds; over
    rounds it is 26 %. (Speedups, with processes: test_predict.py.)"""
    truth = true_length()
    covered = {"prompts": 0, "rounds": 0}
    for number in range(600):
        rng = np.random.default_rng([7, number])
        study = simulate(200, rng)
        pooled = study.outcomes.sum(axis=0)
        rounds = rng.multinomial(int(pooled.sum()), pooled / pooled.sum(), size=NUM_DRAWS)
        over_prompts = pooled_ratio(draw_weights(200, NUM_DRAWS, rng), study.tokens, study.rounds)
        of_rounds = rounds @ (KEPT + 1.0) / pooled.sum()
        for name, found in (("prompts", over_prompts), ("rounds", Estimate(over_prompts.value, of_rounds, NOTHING))):
            low, high = found.interval()
            covered[name] += low <= truth <= high
    assert 558 <= covered["prompts"] <= 582, covered
    assert covered["rounds"] < 300, covered  # rounds of one prompt are alike: the same check fails by far


def test_few_prompts_get_wider_intervals_not_wrong_ones() -> None:
    """500 studies of 8 prompts: plain percentiles cover 86 %, the bias-corrected and widened interval 95 %."""
    truth, mine, percentile = true_length(), 0, 0
    for number in range(500):
        rng = np.random.default_rng([8, number])
        study = simulate(8, rng)
        estimate = pooled_ratio(draw_weights(8, NUM_DRAWS, rng), study.tokens, study.rounds)
        low, high = estimate.interval()
        mine += low <= truth <= high
        low, high = np.quantile(estimate.draws, [0.025, 0.975])
        percentile += low <= truth <= high
    assert 465 <= mine <= 487 and percentile <= 445, (mine, percentile)


def some_estimate(num_prompts: int, processes: Floats = NOTHING) -> Estimate:
    rng = np.random.default_rng(11)
    study = simulate(num_prompts, rng)
    found = pooled_ratio(draw_weights(num_prompts, 4000, rng), study.tokens, study.rounds)
    drawn = np.exp(rng.standard_normal((4000, len(processes))) @ processes)
    free = max(1.0, len(processes) - 1.0)
    return found._replace(draws=found.draws * drawn, process=processes * found.value, process_dof=free)


@pytest.mark.parametrize("num_prompts", [4, 8, 64])
def test_a_probability_is_read_from_the_widened_interval(num_prompts: int) -> None:
    """P(value > the lower end of the central 90 % interval) is 95 %, and so on: one statement, said in two ways."""
    found = some_estimate(num_prompts)
    for level in (0.5, 0.9, 0.99):
        low, high = found.interval(level)
        assert found.p_above(low) == pytest.approx((1 + level) / 2, abs=0.005)
        assert found.p_above(high) == pytest.approx((1 - level) / 2, abs=0.005)
    lower = found.interval()[0]
    if num_prompts < 64:
        assert float((found.draws > lower).mean()) > 0.98, "raw draws are surer than they may be"


def test_few_prompts_are_never_certain() -> None:
    two = pooled_ratio(draw_weights(2, 500, np.random.default_rng(0)), np.array([15.0, 16.0]), np.array([10.0, 10.0]))
    assert (two.draws > 1.0).all() and (two.p_above(1.0) or 1.0) < 0.99 and not two.is_decisive
    one = pooled_ratio(draw_weights(1, 500, np.random.default_rng(0)), np.array([15.0]), np.array([10.0]))
    assert one.p_above(1.0) is None and not one.is_decisive
    alike = pooled_ratio(draw_weights(3, 500, np.random.default_rng(0)), np.full(3, 15.0), np.full(3, 10.0))
    assert alike.p_above(1.0) is None, "three that agree to the last digit still say nothing of a fourth"


def test_prompts_are_counted_by_what_they_weigh() -> None:
    """Eight prompts, one of which holds nine tenths of the rounds, are worth one, and decide nothing."""
    rounds = np.array([630.0, *[10.0] * 7])
    found = pooled_ratio(draw_weights(8, 500, np.random.default_rng(0)), rounds * 1.5 + np.arange(8), rounds)
    assert found.prompts.effective == pytest.approx(1.0 / (0.9**2 + 7 * (1 / 70) ** 2)) and not found.is_decisive
    equal = pooled_ratio(draw_weights(8, 500, np.random.default_rng(0)), np.arange(8.0) + 9, np.full(8, 10.0))
    assert equal.prompts == pytest.approx((8.0, 7.0, 8 / 7)) and equal.is_decisive


def test_processes_widen_an_interval_and_few_of_them_more() -> None:
    """Loadings of one variance, from three processes and from nine: the same spread of draws, less of it known."""
    alone = some_estimate(200)
    widths = []
    for num in (3, 9):
        loadings = np.full(num, 0.03 / np.sqrt(num)) * (-1.0) ** np.arange(num)
        low, high = some_estimate(200, loadings).interval()
        widths.append(high - low)
    low, high = alone.interval()
    assert widths[0] > 1.2 * widths[1] > 1.2 * (high - low)


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


@pytest.mark.parametrize(
    ("free", "share", "printed"),
    [
        (1, 0.975, 12.7062),
        (2, 0.975, 4.3027),
        (3, 0.975, 3.1824),
        (10, 0.95, 1.8125),
        (30, 0.995, 2.7500),
        (120, 0.975, 1.9799),
    ],
)
def test_quantiles_are_those_of_the_tables(free: int, share: float, printed: float) -> None:
    assert student_quantile(share, free) == pytest.approx(printed, abs=6e-5)
    assert student_quantile(1.0 - share, free) == pytest.approx(-printed, abs=6e-5)


@given(st.floats(1.0, 3000.0), st.floats(0.001, 0.999))
def test_the_quantile_undoes_the_distribution(free: float, share: float) -> None:
    assert student_cdf(student_quantile(share, free), round(free, 3)) == pytest.approx(share, abs=1e-6)


def test_very_many_degrees_of_freedom_are_the_normal_distribution() -> None:
    for free in (NEARLY_NORMAL - 1.0, NEARLY_NORMAL):
        assert student_quantile(0.975, free) == pytest.approx(NormalDist().inv_cdf(0.975), abs=2e-3)


@given(st.lists(st.floats(0.5, 4.0), min_size=1, max_size=9), st.floats(0.0, 0.2))
def test_without_chance_it_is_the_smallest_within_the_tolerance(speeds: list[float], tolerance: float) -> None:
    first = near_best(np.array([speeds]), tolerance, 0.95)[0]
    limit = max(speeds) * (1.0 - tolerance)
    assert speeds[first] >= limit - 1e-9
    assert all(speed < limit + 1e-9 for speed in speeds[:first])


def test_what_is_slow_for_all_of_them_cancels() -> None:
    """Prompts move all depths by 20 %, depth 3 is 2 % faster than depth 2 in every draw: nothing smaller will do."""
    rng = np.random.default_rng(0)
    draws = np.exp(0.2 * rng.standard_normal((2000, 1))) * np.array([1.40, 1.47, 1.50])
    assert near_best(draws, 0.01, 0.95) == [2]
    assert near_best(draws, 0.03, 0.95) == [1, 2]
    assert p_best(draws).tolist() == [0.0, 0.0, 1.0]
    assert losses(draws)[:, 0] == pytest.approx(np.full(2000, 1 - 1.40 / 1.50))


def test_where_none_is_sure_the_least_expected_loss_is_taken() -> None:
    """Depth 3 is best on average; depth 2 is best as often, and loses more where it is not."""
    rng = np.random.default_rng(1)
    draws = np.array([1.2, 1.48, 1.5]) * np.exp(np.array([0.0, 0.08, 0.02]) * rng.standard_normal((4000, 3)))
    assert near_best(draws, 0.01, 0.95) == [2]


def test_a_depth_that_is_nearly_always_as_good_is_taken_before_a_deeper_one() -> None:
    rng = np.random.default_rng(2)
    draws = np.array([1.0, 1.496, 1.5]) * np.exp(0.002 * rng.standard_normal((4000, 3)))
    assert near_best(draws, 0.01, 0.95) == [1, 2]
    assert near_best(draws, 0.0, 0.95) == [2]
