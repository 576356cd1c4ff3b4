"""Student's quantiles against printed tables, and against themselves."""

from __future__ import annotations

from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.speedup.statistics.student import NEARLY_NORMAL, student_cdf, student_quantile


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
