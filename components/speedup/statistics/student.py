"""Student's t distribution for any degrees of freedom from 1 up, for bounds with an estimated spread.

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
NEARLY_NORMAL = 2000.0  # from here on the normal distribution is right to three digits at every level in use


def student_cdf(t: float, dof: float) -> float:
    """The share of Student's distribution with `free` degrees of freedom that lies below t."""
    assert dof >= 1.0, f"Student's distribution needs a degree of freedom: {dof}"
    if dof >= NEARLY_NORMAL:
        return _NORMAL.cdf(t)
    return 0.5 + _area(math.atan(t / math.sqrt(dof)), dof)


def student_quantile(share: float, dof: float) -> float:
    """The t below which `share` (0 to 1, both excluded) of the distribution lies."""
    assert 0.0 < share < 1.0, f"a quantile is of a share between 0 and 1: {share}"
    return _quantile(share, round(max(1.0, dof), 3))


@lru_cache(maxsize=4096)
def _quantile(share: float, dof: float) -> float:
    if dof >= NEARLY_NORMAL:
        return _NORMAL.inv_cdf(share)
    low, high = -math.pi / 2, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + _area(middle, dof) < share:
            low = middle
        else:
            high = middle
    return math.sqrt(dof) * math.tan((low + high) / 2)


def _area(angle: float, dof: float) -> float:
    """The probability between 0 and an angle."""
    scale = math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)
    values = np.cos((_POINTS + 1) * (angle / 2)) ** (dof - 1)
    return scale * angle / 2 * float(_WEIGHTS @ values)
