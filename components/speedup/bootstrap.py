"""Confidence intervals: a joint bootstrap over prompts, normal variation over processes, wider for small samples.

Prompts, not rounds, are resampled: rounds of one answer are alike, and intervals over rounds come out up to 27 times
too narrow. One draw of prompts and processes serves every depth and every drafter, so that differences are paired.
A fresh process has its own memory layout and kernels; its effect on a cost ratio is a second level, drawn as
    exp(sum_s xi_s d_s),   d_s = (x_s - mean x) / sqrt(m (m - 1)),   xi_s standard normal
where x_s is the log ratio of process s over its own plain decoding: the draws spread as the mean of m processes does.

Intervals are BCa (bias-corrected and accelerated; Efron 1987, Efron & Tibshirani 1993, eq. 14.10): they follow the skew
of a ratio over few prompts, where plain percentiles are short on one side. With z0 the bias and a the acceleration,
    alpha(z) = Phi(z0 + (z0 + z) / (1 - a (z0 + z)))          is the quantile of the draws at each end.
a comes from the influence of each prompt; processes add spread and no skew, so a shrinks as they take over (Davison &
Hinkley 1997, section 5.3.2; our l_i / n are their empirical influence values). Both spreads are themselves estimates.
Each end's distance from the estimate is therefore stretched by t / z, Student's quantile over the normal one, with the
degrees of freedom of a sum of variances (Welch 1947, Satterthwaite 1946; `Sample` counts prompts), and by the share of
the prompts' variance that a bootstrap misses.

Student's t distribution is integrated here for any degrees of freedom from 1 up: with t = sqrt(v) tan(a) its density is
proportional to cos(a)^(v - 1) on (-pi/2, pi/2), which Gauss-Legendre points integrate to ten digits; the quantile is
found by bisection on the angle.

Several speeds are compared in paired draws: in one draw every candidate has the same prompts and processes, so what is
slow for all of them cancels, which separate bounds do not use. The loss of a candidate in a draw is 1 - its speed /
that of the best; `near_best` has the candidates that are as good as the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.refusals import PROMPTS

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
    scale, angle = _scale(dof), math.atan(_NORMAL.inv_cdf(share) / math.sqrt(dof))
    for _ in range(60):  # Newton's steps while they stay between the bounds, halves of what is left else
        above = 0.5 + _area(angle, dof) - share
        low, high = (low, angle) if above > 0.0 else (angle, high)
        slope = scale * math.cos(angle) ** (dof - 1)
        following = angle - above / slope if slope > 0.0 else low
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - angle) <= 1e-14:
            break
        angle = following
    return math.sqrt(dof) * math.tan(angle)


def _scale(dof: float) -> float:
    """The density of the angle at 0."""
    return math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi)


def _area(angle: float, dof: float) -> float:
    """The probability between 0 and an angle."""
    values = np.cos((_POINTS + 1) * (angle / 2)) ** (dof - 1)
    return _scale(dof) * angle / 2 * float(_WEIGHTS @ values)


Floats = NDArray[np.float64]
_EMPTY: Floats = np.zeros(0)


def draw_weights(num_units: int, num_draws: int, rng: np.random.Generator) -> Floats:
    """[num_draws, num_units]: how often each unit occurs in each resample of `num_units` units."""
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
    """Influence l_i / n of each unit on the pooled ratio, in the shape of `above`.

    Its sum of squares is the variance of the ratio, its sum of cubes the third moment.
    """
    total = below.sum(axis=0)
    return np.asarray((above - below * (above.sum(axis=0) / total)) / total)


class Sample(NamedTuple):
    """Effective size of the sample of prompts behind a number.

    effective: (sum w)^2 / sum w^2 over rounds or times w of the prompts; n where they are equal, less where a few hold
    most of them. dof: degrees of freedom of the variance over prompts, n - 1 where they are equal. inflation: factor
    from a resample's variance to the true one, n / (n - 1) where they are equal.
    """

    effective: float
    dof: float
    inflation: float

    def combined_with(self, other: Sample) -> Sample:
        """The sample of a number computed from two over the same prompts: the less certain of both."""
        pairs = zip(self, other, strict=True)
        effective, dof, inflation = (pick(pair) for pick, pair in zip((min, min, max), pairs, strict=True))
        return Sample(effective, dof, inflation)


def joined_sample(parts: Sequence[tuple[Floats, Sample]]) -> Sample:
    """The sample of a number computed from several over different prompts. parts: (influence on it, sample) of each."""
    variances = [float((influence**2).sum()) for influence, _ in parts]
    samples = [sample for _, sample in parts]
    whole = [v * s.inflation for v, s in zip(variances, samples, strict=True)]
    spread = sum(v**2 / s.dof for v, s in zip(whole, samples, strict=True))
    return Sample(
        effective=min(s.effective for s in samples),
        dof=sum(whole) ** 2 / spread if spread > 0.0 else min(s.dof for s in samples),
        inflation=sum(whole) / sum(variances) if sum(variances) > 0.0 else 1.0,
    )


def sample_of(below: Floats, influence: Floats) -> Sample:
    """The sample of a pooled ratio. below: [prompts], the denominator, which gives each prompt its weight.

    A prompt with the share h of the weight pulls the ratio towards itself, so that its residual is too small by 1 - h
    (the jackknife's correction). A variance with weights h_i^2 has (sum h^2)^2 / sum h^4 - 1 degrees of freedom.
    """
    share = below / below.sum()
    squares = share**2
    effective = 1.0 / float(squares.sum())
    dof = float(squares.sum() ** 2 / (squares**2).sum()) - 1.0
    variance = float((influence**2).sum())
    lacking = np.minimum(share, 0.9)
    inflation = float((influence**2 / (1.0 - lacking)).sum()) / variance if variance > 0.0 else 1.0
    return Sample(effective, max(1.0, dof), inflation)


class Estimate(NamedTuple):
    """A number with its uncertainty.

    value: from the measured data. draws: [draws], from each resample of prompts and processes. influence: [prompts],
    l_i / n of each prompt, whose sum of squares is the variance due to prompts. sample: their effective size; None: all
    weigh the same. process: [units], the same for processes and all that varies apart from prompts; empty for a single
    process. process_dof: degrees of freedom of that variance. minimum: the lowest possible value, 0 for a ratio of
    counts or times.
    """

    value: float
    draws: Floats
    influence: Floats
    sample: Sample | None = None
    process: Floats = _EMPTY
    process_dof: float = math.inf
    minimum: float = -math.inf

    @property
    def prompts(self) -> Sample:
        """The sample of prompts behind the number."""
        n = len(self.influence)
        return self.sample or Sample(float(n), max(1.0, n - 1.0), n / max(1, n - 1))

    @property
    def is_decisive(self) -> bool:
        """Whether enough prompts stand behind the number for a verdict: PROMPTS.decide, also in effective size."""
        # Four answers of unequal length have an effective size of a little under four.
        return len(self.influence) >= PROMPTS.decide and self.prompts.effective > PROMPTS.decide - 1

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The central interval."""
        ends = _IntervalEnds.of(self)
        if ends is None:
            return self.value, self.value
        low, high = (ends.end(student_quantile(share, ends.dof)) for share in ((1 - level) / 2, (1 + level) / 2))
        return max(self.minimum, low), high

    def p_above(self, bound: float) -> float | None:
        """P(value > bound): the confidence at which the lower end of the widened interval is `bound`.

        None where chance is not known: a single prompt, or a few that agree to the last digit.
        """
        ends = _IntervalEnds.of(self) if len(self.influence) > 1 else None
        if ends is None:
            return float(self.value > bound) if len(self.influence) >= PROMPTS.decide else None
        low, high = -math.pi / 2, math.pi / 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if ends.end(math.tan(middle)) < bound else (low, middle)
        return 1.0 - student_cdf(math.tan((low + high) / 2), ends.dof)

    def over(self, other: Estimate) -> Estimate:
        """The quotient of two estimates that share prompts, processes and draws."""
        slopes = (1.0 / other.value, -self.value / other.value**2)
        quotient = self._combined(other, self.value / other.value, self.draws / other.draws, slopes)
        return quotient._replace(minimum=0.0 if min(self.minimum, other.minimum) >= 0.0 else -math.inf)

    def minus_paired(self, other: Estimate) -> Estimate:
        """The difference of two estimates that share prompts, processes and draws."""
        return self._combined(other, self.value - other.value, self.draws - other.draws, (1.0, -1.0))

    def _combined(self, other: Estimate, value: float, draws: Floats, slopes: tuple[float, float]) -> Estimate:
        slope, other_slope = slopes
        process = self.process if len(self.process) else np.zeros_like(other.process)
        other_process = other.process if len(other.process) else np.zeros_like(self.process)
        return Estimate(
            value,
            draws,
            slope * self.influence + other_slope * other.influence,
            self.prompts.combined_with(other.prompts),
            slope * process + other_slope * other_process,
            min(self.process_dof, other.process_dof),
        )

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two estimates over different prompts, resampled separately."""
        both = np.concatenate([self.influence, -other.influence])
        sample = joined_sample([(self.influence, self.prompts), (other.influence, other.prompts)])
        return Estimate(self.value - other.value, self.draws - other.draws, both, sample)


def pooled_ratio(weights: Floats, above: Floats, below: Floats) -> Estimate:
    """sum(above) / sum(below) over prompts. above, below: [prompts]; weights as from draw_weights."""
    influence = ratio_influence(above, below)
    value = float(above.sum() / below.sum())
    draws = ratio_draws(weights, above, below)
    return Estimate(value, draws, influence, sample_of(below, influence), minimum=0.0)


class _IntervalEnds(NamedTuple):
    """Ends of an interval as a function of Student's t."""

    value: float
    ordered: Floats  # the draws
    bias: float
    skew: float
    stretch: float
    dof: float

    @classmethod
    def of(cls, estimate: Estimate) -> _IntervalEnds | None:
        """None where the draws do not vary."""
        value, draws = estimate.value, estimate.draws
        spread = float(draws.std())
        if spread <= 1e-12 * max(1.0, abs(value)):
            return None
        below = float((draws < value).mean() + 0.5 * (draws == value).mean())
        edge = 0.5 / len(draws)
        prompts, process = float((estimate.influence**2).sum()), float((estimate.process**2).sum())
        whole = prompts * estimate.prompts.inflation + process
        dof = math.inf
        if whole > 0.0:
            by_prompts = (prompts * estimate.prompts.inflation) ** 2 / estimate.prompts.dof if prompts else 0.0
            dof = whole**2 / (by_prompts + process**2 / estimate.process_dof)
        return cls(
            value=value,
            ordered=np.sort(draws),
            bias=_NORMAL.inv_cdf(min(1.0 - edge, max(edge, below))),
            skew=float((estimate.influence**3).sum()) / (6.0 * spread**3),
            stretch=math.sqrt(whole / (prompts + process)) if whole > 0.0 else 1.0,
            dof=max(1.0, dof),
        )

    def end(self, t: float) -> float:
        """The end of the interval at t, which is negative for the lower end; it rises with t."""
        t = t if abs(t) > 1e-6 else 1e-6
        share = student_cdf(t, self.dof)
        z = _NORMAL.inv_cdf(min(1.0 - 1e-12, max(1e-12, share)))
        shifted = self.bias + z
        quantile = _NORMAL.cdf(self.bias + shifted / max(1e-3, 1.0 - self.skew * shifted))
        place = quantile * (len(self.ordered) - 1)
        end = float(np.interp(place, [math.floor(place), math.floor(place) + 1], self.ordered[self._neighbours(place)]))
        return self.value + (end - self.value) * self.stretch * t / z

    def _neighbours(self, place: float) -> list[int]:
        last = len(self.ordered) - 1
        return [math.floor(place), min(last, math.floor(place) + 1)]


def losses(draws: Floats) -> Floats:
    """[draws, n] speeds -> [draws, n] share of speed that each candidate loses to the best of the draw."""
    return np.asarray(1.0 - draws / draws.max(axis=1, keepdims=True))


def p_best(draws: Floats) -> Floats:
    """[n]: the share of draws in which each candidate is the fastest."""
    return np.asarray(np.bincount(draws.argmax(axis=1), minlength=draws.shape[1]) / len(draws))


def near_best(draws: Floats, tolerance: float, confidence: float) -> list[int]:
    """Indices, ascending, of candidates that lose at most `tolerance` to the best in a share `confidence` of the draws.

    Where there is none, the one with the least expected loss.
    """
    lost = losses(draws)
    # 1e-12: speeds that differ by rounding alone count as equal.
    sure = (lost <= tolerance + 1e-12).mean(axis=0) >= confidence
    return [int(i) for i in np.flatnonzero(sure)] or [int(lost.mean(axis=0).argmin())]
