"""A steady time says how long the work takes, not how busy the machine was."""

from __future__ import annotations

import math

import numpy as np
import pytest

from components.definitions import steady


def test_it_is_the_mean_of_the_shortest_tenth_of_three_at_least_or_of_the_lower_half() -> None:
    assert steady([5.0]) == 5.0
    assert steady([9.0, 4.0]) == 4.0
    assert steady([1.0, 2.0, 30.0]) == 1.5
    assert steady([1.0, 2.0, 30.0, math.nan, 40.0]) == 1.5
    assert steady(range(1, 31)) == steady(range(1, 7)) == 2.0
    assert steady(range(1, 32)) == 2.5 and steady(range(1, 101)) == 5.5
    assert math.isnan(steady([])) and math.isnan(steady([math.nan]))


def test_other_work_hardly_moves_it() -> None:
    """A third of the timings take up to three times as long: the mean moves by a tenth and more, it does not."""
    rng = np.random.default_rng(0)
    quiet = 10.0 * (1.0 + 0.01 * rng.gamma(1.0, 1.0, size=60))
    busy = np.where(rng.random(60) < 0.33, quiet * rng.uniform(1.2, 3.0, size=60), quiet)
    assert busy.mean() > 1.1 * quiet.mean()
    assert steady(busy) == pytest.approx(steady(quiet), rel=0.01)
