"""How sure we are: prompts are resampled jointly, processes vary a normal way, and intervals are widened for being few.

Prompts, not rounds, are resampled: rounds of one answer are alike, and intervals over rounds come out up to 27 times
too narrow. One draw serves every depth and every drafter, in prompts and in processes, so that differences are paired.
A fresh process has its own memory layout and kernels: what it does to a cost ratio is a second level, drawn as
    exp(sum_s xi_s d_s),   d_s = (x_s - mean x) / sqrt(m (m - 1)),   xi_s standard normal
with x_s the log ratio of process s against its own plain decoding, so that the draws spread as the mean of m does.

Intervals are BCa (bias-corrected and accelerated; Efron 1987, Efron & Tibshirani 1993, eq. 14.10): they follow the skew
of a ratio over few prompts, where plain percentiles are short on one side. With z0 the bias and a the acceleration,
    alpha(z) = Phi(z0 + (z0 + z) / (1 - a (z0 + z)))          is the quantile of the draws to take for each end.
a comes from the influence of each prompt; processes add spread and no skew, so a shrinks as they take over (Davison &
Hinkley 1997, section 5.3.2, our l_i / n being their empirical influence values). Both spreads are themselves estimated,
so each end's distance from the estimate is stretched by t / z, Student's quantile over that of the normal, with the
degrees of freedom of a sum of variances (Welch 1947, Satterthwaite 1946), prompts counted by `Sample`, and by what the
bootstrap lacks of the prompts' variance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.speedup.student import student_cdf, student_quantile

Floats = NDArray[np.float64]
_NORMAL = NormalDist()
_NONE: Floats = np.zeros(0)
LEAST_PROMPTS = 4
"""Prompts behind a bound that a verdict rests on, and that promotion asks for. How prompts differ is known from them
alone: one says nothing of it, and three hardly anything. Four let a trial run decide; flags say what is few for a
release.
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


class Sample(NamedTuple):
    """How much the prompts behind a number are worth.

    effective: (sum w)^2 / sum w^2 of their rounds or times w, so that a few which hold most of them count as few; of
    equal ones it is their number. free: degrees of freedom of the variance over them, n - 1 where they are equal.
    inflation: what a resample's variance lacks, n / (n - 1) where they are equal.
    """

    effective: float
    free: float
    inflation: float

    def and_also(self, other: Sample) -> Sample:
        """The sample behind a number made of two over the same prompts: the less certain of both."""
        pairs = zip(self, other, strict=True)
        effective, free, inflation = (pick(pair) for pick, pair in zip((min, min, max), pairs, strict=True))
        return Sample(effective, free, inflation)


def joined_sample(parts: Sequence[tuple[Floats, Sample]]) -> Sample:
    """The sample behind a number made of several over different prompts. parts: (influence on it, sample) of each."""
    variances = [float((influence**2).sum()) for influence, _ in parts]
    samples = [sample for _, sample in parts]
    whole = [v * s.inflation for v, s in zip(variances, samples, strict=True)]
    spread = sum(v**2 / s.free for v, s in zip(whole, samples, strict=True))
    return Sample(
        effective=min(s.effective for s in samples),
        free=sum(whole) ** 2 / spread if spread > 0.0 else min(s.free for s in samples),
        inflation=sum(whole) / sum(variances) if sum(variances) > 0.0 else 1.0,
    )


def sample_of(below: Floats, influence: Floats) -> Sample:
    """The sample behind a pooled ratio. below: [prompts], its denominator, which is what weighs the prompts.

    A prompt with the share h of the weight pulls the ratio to itself, so its residual is too small by 1 - h (the jack-
    knife's correction); and a variance in which prompt i weighs h_i^2 has (sum h^2)^2 / sum h^4 terms, less the mean's.
    """
    share = below / below.sum()
    squares = share**2
    effective = 1.0 / float(squares.sum())
    free = float(squares.sum() ** 2 / (squares**2).sum()) - 1.0
    variance = float((influence**2).sum())
    lacking = np.minimum(share, 0.9)
    inflation = float((influence**2 / (1.0 - lacking)).sum()) / variance if variance > 0.0 else 1.0
    return Sample(effective, max(1.0, free), inflation)


class Estimate(NamedTuple):
    """A number with its uncertainty.

    value: on what was measured. draws: [draws], in each resample of prompts and processes. influence: [prompts], l_i /
    n of each prompt on it, whose sum of squares is the variance that prompts cause. sample: what these prompts are
    worth; None: all weigh the same. process: [units], how far each process (and what else varies apart from prompts)
    moves it, likewise; none where one process was all. process_free: degrees of freedom of that variance. least: what
    it cannot lie below, 0 for a ratio of counts or times.
    """

    value: float
    draws: Floats
    influence: Floats
    sample: Sample | None = None
    process: Floats = _NONE
    process_free: float = math.inf
    least: float = -math.inf

    @property
    def prompts(self) -> Sample:
        """What the prompts behind it are worth."""
        n = len(self.influence)
        return self.sample or Sample(float(n), max(1.0, n - 1.0), n / max(1, n - 1))

    @property
    def is_decisive(self) -> bool:
        """Whether there are prompts enough behind it for a verdict: LEAST_PROMPTS, also by what they are worth."""
        # More than one prompt less than asked: four answers of unequal length are worth a little under four.
        return len(self.influence) >= LEAST_PROMPTS and self.prompts.effective > LEAST_PROMPTS - 1

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The central interval."""
        ends = _Ends.of(self)
        if ends is None:
            return self.value, self.value
        low, high = (ends.at(student_quantile(share, ends.free)) for share in ((1 - level) / 2, (1 + level) / 2))
        return max(self.least, low), high

    def p_above(self, bound: float) -> float | None:
        """The confidence at which the interval's lower end is `bound`: P(value > bound), from the widened interval.

        None where nothing tells how far chance could move it: a single prompt, or a few that agree to the last digit.
        """
        ends = _Ends.of(self) if len(self.influence) > 1 else None
        if ends is None:
            return float(self.value > bound) if len(self.influence) >= LEAST_PROMPTS else None
        low, high = -math.pi / 2, math.pi / 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if ends.at(math.tan(middle)) < bound else (low, middle)
        return 1.0 - student_cdf(math.tan((low + high) / 2), ends.free)

    def over(self, other: Estimate) -> Estimate:
        """The quotient of two estimates over the same prompts and processes in the same draws."""
        slopes = (1.0 / other.value, -self.value / other.value**2)
        found = self._with(other, self.value / other.value, self.draws / other.draws, slopes)
        return found._replace(least=0.0 if min(self.least, other.least) >= 0.0 else -math.inf)

    def minus_paired(self, other: Estimate) -> Estimate:
        """The difference of two estimates over the same prompts and processes in the same draws."""
        return self._with(other, self.value - other.value, self.draws - other.draws, (1.0, -1.0))

    def _with(self, other: Estimate, value: float, draws: Floats, slopes: tuple[float, float]) -> Estimate:
        ours, theirs = slopes
        process = self.process if len(self.process) else np.zeros_like(other.process)
        others = other.process if len(other.process) else np.zeros_like(self.process)
        return Estimate(
            value,
            draws,
            ours * self.influence + theirs * other.influence,
            self.prompts.and_also(other.prompts),
            ours * process + theirs * others,
            min(self.process_free, other.process_free),
        )

    def minus(self, other: Estimate) -> Estimate:
        """The difference of two estimates over different prompts, which were resampled apart."""
        both = np.concatenate([self.influence, -other.influence])
        sample = joined_sample([(self.influence, self.prompts), (other.influence, other.prompts)])
        return Estimate(self.value - other.value, self.draws - other.draws, both, sample)


def pooled_ratio(weights: Floats, above: Floats, below: Floats) -> Estimate:
    """sum(above) / sum(below) over prompts. above, below: [prompts]; weights as from draw_weights."""
    influence = ratio_influence(above, below)
    value = float(above.sum() / below.sum())
    draws = ratio_draws(weights, above, below)
    return Estimate(value, draws, influence, sample_of(below, influence), least=0.0)


class _Ends(NamedTuple):
    """The end of an interval as a function of Student's t."""

    value: float
    ordered: Floats  # the draws
    bias: float
    skew: float
    stretch: float
    free: float

    @classmethod
    def of(cls, estimate: Estimate) -> _Ends | None:
        """None where the draws do not vary."""
        value, draws = estimate.value, estimate.draws
        spread = float(draws.std())
        if spread <= 1e-12 * max(1.0, abs(value)):
            return None
        below = float((draws < value).mean() + 0.5 * (draws == value).mean())
        edge = 0.5 / len(draws)
        prompts, process = float((estimate.influence**2).sum()), float((estimate.process**2).sum())
        whole = prompts * estimate.prompts.inflation + process
        free = math.inf
        if whole > 0.0:
            by_prompts = (prompts * estimate.prompts.inflation) ** 2 / estimate.prompts.free if prompts else 0.0
            free = whole**2 / (by_prompts + process**2 / estimate.process_free)
        return cls(
            value=value,
            ordered=np.sort(draws),
            bias=_NORMAL.inv_cdf(min(1.0 - edge, max(edge, below))),
            skew=float((estimate.influence**3).sum()) / (6.0 * spread**3),
            stretch=math.sqrt(whole / (prompts + process)) if whole > 0.0 else 1.0,
            free=max(1.0, free),
        )

    def at(self, t: float) -> float:
        """Where the interval ends; t is negative for the lower end. Rises with t."""
        t = t if abs(t) > 1e-6 else 1e-6
        share = student_cdf(t, self.free)
        z = _NORMAL.inv_cdf(min(1.0 - 1e-12, max(1e-12, share)))
        shifted = self.bias + z
        quantile = _NORMAL.cdf(self.bias + shifted / max(1e-3, 1.0 - self.skew * shifted))
        place = quantile * (len(self.ordered) - 1)
        at = float(np.interp(place, [math.floor(place), math.floor(place) + 1], self.ordered[self._around(place)]))
        return self.value + (at - self.value) * self.stretch * t / z

    def _around(self, place: float) -> list[int]:
        last = len(self.ordered) - 1
        return [math.floor(place), min(last, math.floor(place) + 1)]
