"""The speedup model: the worked example, and identities that hold for all numbers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.speedup.prediction.model import acceptance_lengths, evaluate, marginal_cost, marginal_gain, speedup

unit = st.floats(0.0, 1.0)
ms = st.floats(0.1, 1000.0)


def test_worked_example_chooses_depth_two() -> None:
    rows = evaluate([0.80, 0.74, 0.67], 76.0, [90.0, 104.0, 117.0], [8.0, 14.0, 22.0])
    assert [round(r.al, 2) for r in rows[1:]] == [1.80, 2.39, 2.79]
    assert [round(r.speedup, 2) for r in rows[1:]] == [1.40, 1.54, 1.52]
    assert max(rows, key=lambda r: r.speedup).depth_k == 2


@given(st.lists(unit, max_size=12))
def test_acceptance_length_is_monotone_and_bounded(p: list[float]) -> None:
    lengths = acceptance_lengths(p)
    assert lengths[0] == 1.0
    assert all(a <= b <= a + 1.0 for a, b in itertools.pairwise(lengths))


@given(st.lists(st.tuples(st.floats(0.01, 1.0), ms, ms), min_size=1, max_size=8), ms)
def test_speedup_rises_exactly_while_gain_exceeds_cost(
    steps: list[tuple[float, float, float]], t_target: float
) -> None:
    rows = evaluate([s[0] for s in steps], t_target, [s[1] for s in steps], [s[2] for s in steps])
    for before, after in itertools.pairwise(rows):
        gain, cost = after.marginal_gain, after.marginal_cost
        assert gain is not None and cost is not None
        if abs(gain - cost) > 1e-9 * (1.0 + abs(cost)):
            assert (after.speedup > before.speedup) == (gain > cost)


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
