"""The speedup model: the worked example, and identities that hold for all numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_rows import speedup

from components.speedup.prediction.predict import acceptance_lengths, marginal_cost, marginal_gain

unit = st.floats(0.0, 1.0)
ms = st.floats(0.1, 1000.0)


def test_worked_example_chooses_depth_two() -> None:
    lengths = acceptance_lengths([0.80, 0.74, 0.67])
    assert [round(al, 2) for al in lengths[1:]] == [1.80, 2.39, 2.79]
    rounds = zip(lengths, [76.0, 90.0, 104.0, 117.0], [0.0, 8.0, 14.0, 22.0], strict=True)
    speeds = [speedup(al, 76.0, verify, draft) for al, verify, draft in rounds]
    assert [round(speed, 2) for speed in speeds] == [1.0, 1.40, 1.54, 1.52]
    assert speeds.index(max(speeds)) == 2


@given(st.lists(unit, max_size=12))
def test_acceptance_length_is_monotone_and_bounded(p: list[float]) -> None:
    lengths = acceptance_lengths(p)
    assert lengths[0] == 1.0
    assert all(a <= b <= a + 1.0 for a, b in itertools.pairwise(lengths))


@given(st.lists(st.tuples(st.floats(0.01, 1.0), ms, ms), min_size=1, max_size=8), ms)
def test_speedup_rises_exactly_while_gain_exceeds_cost(
    steps: list[tuple[float, float, float]], t_target: float
) -> None:
    rounds = [(t_target, 0.0), *((verify, draft) for _, verify, draft in steps)]
    depths = list(zip(acceptance_lengths([p for p, _, _ in steps]), rounds, strict=True))
    for (al_before, before), (al, after) in itertools.pairwise(depths):
        gain, cost = marginal_gain(al, al_before), marginal_cost(sum(after), sum(before))
        if abs(gain - cost) > 1e-9 * (1.0 + abs(cost)):
            assert (speedup(al, t_target, *after) > speedup(al_before, t_target, *before)) == (gain > cost)


@given(st.floats(1.0, 10.0), ms, ms, ms, st.floats(0.01, 100.0))
def test_speedup_has_no_unit(al: float, target: float, verify: float, draft: float, scale: float) -> None:
    once = speedup(al, target, verify, draft)
    assert speedup(al, target * scale, verify * scale, draft * scale) == pytest.approx(once)


def test_host_time_pulls_the_ratio_towards_one_round_per_token() -> None:
    bare = speedup(3.0, 10.0, 12.0, 3.0)
    assert speedup(3.0, 10.0, 12.0, 3.0, host=1.0, host_plain=0.0) < bare
    assert speedup(3.0, 10.0, 12.0, 3.0, host=1.0, host_plain=1.0) == pytest.approx(3.0 * 11.0 / 16.0)


def test_marginal_values_are_relative() -> None:
    assert marginal_gain(2.2, 2.0) == pytest.approx(0.1)
    assert marginal_cost(1.5, 1.2) == pytest.approx(0.25)
