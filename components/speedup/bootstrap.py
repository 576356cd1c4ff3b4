"""How sure we are: joint resampling of prompts (acceptance) and of timing blocks (cost), with bias-corrected intervals.

Prompts, not rounds, are resampled: rounds of one answer are alike, and intervals over rounds come out up to 27 times
too narrow. One draw of prompts serves every depth and every drafter, so that differences are paired.

Intervals are BCa (bias-corrected and accelerated; Efron 1987, Efron & Tibshirani 1993, eq. 14.10): they follow the skew
of a ratio over few prompts, where plain percentiles are short on one side. With z0 the bias and a the acceleration,
    alpha(z) = Phi(z0 + (z0 + z) / (1 - a (z0 + z)))          is the quantile of the draws to take for each end.
a comes from the influence of each prompt; where cost is resampled too it adds spread and no skew (Davison & Hinkley
1997, section 5.3.2, our l_i / n being their empirical influence values), so a shrinks as cost takes over. Resampling n
prompts shows a spread that is too small by sqrt((n - 1) / n) and takes it for known; z is widened by both, as in the
expanded percentile interval of Hesterberg 2015 (The American Statistician 69:371, section 3.3).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL = NormalDist()
LEAST_PROMPTS = 4
"""Prompts behind a bound that a verdict rests on, and that promotion asks for. An interval resamples prompts: over one
it has no width and passes whatever it is, over three it hardly has any. Four let a trial run decide; flags say what is
few for a release.
"""


def draw_weights(num_units: int, num_draws: int, rng: np.random.Generator) -> Floats:
    """[num_draws, num_units]: how often each unit occurs in each resample of num_units units."""
    assert num_units > 0
    picks = rng.integers(0, num_units, size=(num_draws, num_units))
    picks += np.arange(num_draws)[:, None] * num_units
    counts = np.bincount(picks.ravel(), minlength=num_draws * num_units)
    return counts.reshape(num_draws, num_units).astype(np.float64)


def ratio_draws(weights: Floats, above: Floats, below: Floats) -> Floats:
    """Pooled ratio sum(above) / sum(below) in each resample. above, below: [units] or [units, n]; -> [draws(, n)]."""
    columns = np.stack([above.reshape(len(above), -1), below.reshape(len(below), -1)]).transpose(0, 2, 1)
    # Sums along contiguous rows: bit for bit the same on any number of threads, which a BLAS product is not.
    sums = np.einsum("dp,snp->sdn", weights, np.ascontiguousarray(columns))
    return np.asarray(sums[0] / sums[1]).reshape(len(weights), *above.shape[1:])


def ratio_influence(above: Floats, below: Floats) -> Floats:
    """How far one unit of weight on each unit moves the pooled ratio, over n: l_i / n. Same shape as `above`.

    Linear in the unit, so that its sum of squares is the variance of the ratio and its third moment the skew.
    """
    total = below.sum(axis=0)
    return np.asarray((above - below * (above.sum(axis=0) / total)) / total)


def median_draws(values: Floats, num_draws: int, rng: np.random.Generator) -> Floats:
    """Medians over resampled blocks. values: [n, blocks], NaN = not measured; -> [num_draws, n].

    The same blocks are drawn for every row, because the arms of one block ran side by side and drift together. A cell
    missing in one block stands in with its own median, so that it neither helps nor hurts.
    """
    filled = np.where(np.isnan(values), np.nanmedian(values, axis=1, keepdims=True), values)
    picks = rng.integers(0, values.shape[1], size=(num_draws, values.shape[1]))
    return np.median(filled[:, picks], axis=2).T


class Estimate(NamedTuple):
    """A number with its uncertainty.

    value: on what was measured. draws: [draws], in each resample. influence: [prompts], l_i / n of each prompt on it,
    whose sum of squares is the variance that prompts cause.
    """

    value: float
    draws: Floats
    influence: Floats

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The central BCa interval."""
        return interval(self.draws, self.value, self.influence, level)

    def over(self, other: Estimate) -> Estimate:
        """The quotient of two estimates over the same prompts in the same draws."""
        slope = self.influence / other.value - other.influence * (self.value / other.value**2)
        return Estimate(self.value / other.value, self.draws / other.draws, slope)

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two estimates over different prompts, which were resampled apart."""
        both = np.concatenate([self.influence, -other.influence])
        return Estimate(self.value - other.value, self.draws - other.draws, both)

    def minus_paired(self, other: Estimate) -> Estimate:
        """The difference of two estimates over the same prompts in the same draws."""
        return Estimate(self.value - other.value, self.draws - other.draws, self.influence - other.influence)


def pooled_ratio(weights: Floats, above: Floats, below: Floats) -> Estimate:
    """sum(above) / sum(below) over prompts. above, below: [prompts]; weights as from draw_weights."""
    value = float(above.sum() / below.sum())
    return Estimate(value, ratio_draws(weights, above, below), ratio_influence(above, below))


def interval(
    draws: Floats, estimate: float, influence: Floats | None = None, level: float = 0.95
) -> tuple[float, float]:
    """The BCa interval of one quantity. draws: [draws]; estimate: its value on what was measured.

    influence: of each prompt on it, l_i / n (see ratio_influence); None: nothing is known of its skew, a = 0.
    """
    spread = float(draws.std())
    if spread <= 1e-12 * max(1.0, abs(estimate)):
        return estimate, estimate
    below = float((draws < estimate).mean() + 0.5 * (draws == estimate).mean())
    edge = 0.5 / len(draws)
    bias = _NORMAL.inv_cdf(min(1.0 - edge, max(edge, below)))
    skew = 0.0 if influence is None else float((influence**3).sum()) / (6.0 * spread**3)
    ends = []
    for share in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
        shifted = bias + _widened(_NORMAL.inv_cdf(share), None if influence is None else len(influence))
        ends.append(_NORMAL.cdf(bias + shifted / max(1e-3, 1.0 - skew * shifted)))
    low, high = np.quantile(draws, ends)
    return float(low), float(high)


def _widened(z: float, num_prompts: int | None) -> float:
    """Student's quantile for that of the normal, times sqrt(n / (n - 1)). Abramowitz & Stegun 26.7.5, two terms."""
    if num_prompts is None or num_prompts < 2:
        return z
    free = num_prompts - 1
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return student * math.sqrt(num_prompts / free)
