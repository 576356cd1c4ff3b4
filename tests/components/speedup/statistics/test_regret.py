"""The smallest that is as good as the best, in paired draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.speedup.statistics.regret import losses, near_best, p_best


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
