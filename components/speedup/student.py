"""Student's t distribution, for any degrees of freedom from 1 up: what a spread that was estimated adds to a bound.

With t = sqrt(v) tan(a) the density becomes proportional to cos(a)^(v - 1) on (-pi/2, pi/2), which Gauss-Legendre points
integrate to ten digits; the quantile is found by bisection on the angle.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(64)
NEARLY_NORMAL = 2000.0  # from here on the normal distribution is right to three digits at every level we ask for


def student_cdf(t: float, free: float) -> float:
    """The share of Student's distribution with `free` degrees of freedom that lies below t."""
    assert free >= 1.0, f"Student's distribution needs a degree of freedom: {free}"
    if free >= NEARLY_NORMAL:
        return _NORMAL.cdf(t)
    return 0.5 + _area(math.atan(t / math.sqrt(free)), free)


def student_quantile(share: float, free: float) -> float:
    """The t below which `share` (0 to 1, both excluded) of the distribution lies."""
    assert 0.0 < share < 1.0, f"a quantile is of a share between 0 and 1: {share}"
    return _quantile(share, round(max(1.0, free), 3))


@lru_cache(maxsize=4096)
def _quantile(share: float, free: float) -> float:
    if free >= NEARLY_NORMAL:
        return _NORMAL.inv_cdf(share)
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + _area(middle, free) < share:
            low = middle
        else:
            high = middle
    return math.sqrt(free) * math.tan((low + high) / 2)


def _area(angle: float, free: float) -> float:
    """The probability between 0 and an angle."""
    scale = math.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(math.pi)
    values = np.cos((_POINTS + 1) * (angle / 2)) ** (free - 1)
    return scale * angle / 2 * float(_WEIGHTS @ values)
