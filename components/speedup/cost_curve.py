"""The cost of a round as a curve over depth: it smooths the noise of single cells and keeps steps that are real.

x_ks is the log of a round's time at depth k over plain decoding's, in process s (of a single process: in a part of its
blocks). Over depth the ratio is close to a straight line: each draft adds its own time and a row to verify. Empirical
Bayes (after Efron & Morris 1973) shrinks each depth towards the line:
    curve_k = w cell_k + (1 - w) line_k,   w = tau^2 / (tau^2 + se^2)
where se^2 is the variance of one cell, from the differences of processes about the line beyond a shift and a tilt of
each, and tau^2 the spread of cells about the line, at least LEAST_STEP^2. Subtracting se^2 from that spread, as James
and Stein do, loses more where a step is real than it gains elsewhere (tests/components/speedup/test_known_truth.py).
What processes share (one of them had a slow plain baseline) moves the whole line and leaves its shape. Deeper rounds do
more work, so the curve never falls, unless the data show a fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Floats
from components.speedup.student import student_cdf, student_quantile

LEAST_STEP = 0.005  # least assumed unevenness of kernels over depth, a share of a round
CONFIDENCE = 0.99  # of a contradiction, over all depths of a drafter together
ROUNDING_NOISE = 1e-9  # noise up to this is rounding
MIN_DEVIATION = 0.02  # of a contradiction, a share of a round's time; less changes no choice


class Contradiction(NamedTuple):
    """A depth whose cost misses the curve through the others by more than chance. by: share of its time."""

    depth_k: int
    by: float
    falls: bool  # whether it costs less than a shallower depth; else it lies off the line


class Curve(NamedTuple):
    """Log cost ratios over depth, with the effect of each process on them.

    log_ratio: [K]. process: [K, units], loadings as in bootstrap.Estimate; the last K columns belong to one depth each.
    dof: [K], degrees of freedom of that variance at each depth.
    """

    log_ratio: Floats
    process: Floats
    dof: Floats
    contradictions: list[Contradiction]


def cost_curve(depths: Sequence[int], by_unit: Floats, whole: Floats | None = None) -> Curve:
    """The curve through measured costs.

    depths: K of them, ascending, from 1 up. by_unit: [K, units], log ratios in each unit, NaN where one did not measure
    a depth. whole: [K], over all measurements; None: the mean over units. With fewer than two units chance is not
    known, and the cells are returned as they are.
    """
    num_depths, num_units = by_unit.shape
    if num_units < 2:
        assert whole is not None, "without units there is nothing to take a mean of"
        return Curve(whole, np.zeros((num_depths, 0)), np.full(num_depths, math.inf), [])
    mean, deviation = _fit_units(by_unit)
    value = mean if whole is None else whole
    line, noise, noise_dof = _line_and_noise(depths, value, deviation)
    offset = np.log(line.sum(axis=1))  # distance of the line from each cell, in log
    weight = _weight_of_cells(offset, noise, num_depths)
    smooth = weight * np.eye(num_depths) + (1.0 - weight) * line
    log_ratio = value + np.log(weight + (1.0 - weight) * line.sum(axis=1))
    count = (~np.isnan(by_unit)).sum(axis=1, keepdims=True).astype(float)
    loading = smooth @ (deviation / np.sqrt(count * np.maximum(1.0, count - 1.0)))
    own_error = np.full(num_depths, math.sqrt(weight * (1.0 - weight)) * noise)
    if num_depths <= 2:
        noise_dof = math.inf
    outliers = _find_outliers(depths, value, noise, noise_dof)
    log_ratio, loading, falls = _make_monotone(depths, log_ratio, loading, own_error, num_units)
    variance, own_variance = (loading**2).sum(axis=1), own_error**2
    spread = variance**2 / (num_units - 1) + own_variance**2 / max(1.0, noise_dof)
    dof = np.where(spread > 0.0, (variance + own_variance) ** 2 / np.where(spread > 0.0, spread, 1.0), math.inf)
    process = np.concatenate([loading, np.diag(own_error)], axis=1)
    return Curve(log_ratio, process, dof, _one_per_depth(depths, outliers, falls))


def _one_per_depth(
    depths: Sequence[int], outliers: Sequence[Contradiction], falls: Sequence[Contradiction]
) -> list[Contradiction]:
    """At most one contradiction a depth. A fall counts for the deeper depth, unless the one before it is an outlier."""
    by_depth = {outlier.depth_k: outlier for outlier in outliers}
    for fall in falls:
        before = depths[depths.index(fall.depth_k) - 1]
        if before not in by_depth or fall.depth_k in by_depth:
            by_depth[fall.depth_k] = fall
    return [by_depth[depth] for depth in sorted(by_depth)]


def _fit_units(by_unit: Floats) -> tuple[Floats, Floats]:
    """(mean at each depth, deviation of each unit from it, 0 where not measured). Depths and units are fitted together,
    so that a slow unit with other depths than the rest does not make these look slow."""
    measured = ~np.isnan(by_unit)
    filled = np.where(measured, by_unit, 0.0)
    unit, depth = np.zeros(by_unit.shape[1]), np.zeros(by_unit.shape[0])
    for _ in range(1 if measured.all() else 50):
        depth = np.where(measured, filled - unit, 0.0).sum(axis=1) / measured.sum(axis=1)
        unit = np.where(measured, filled - depth[:, None], 0.0).sum(axis=0) / np.maximum(1, measured.sum(axis=0))
        unit -= unit.mean()
    return depth, np.where(measured, filled - depth[:, None], 0.0)


def _line_and_noise(depths: Sequence[int], value: Floats, deviation: Floats) -> tuple[Floats, float, float]:
    """([K, K] projection on straight lines in relative units, standard error of one cell, its degrees of freedom)."""
    if len(depths) <= 2:
        return np.eye(len(depths)), 0.0, math.inf
    line = _line(depths, value)
    num_units = deviation.shape[1]
    residual = deviation - line @ deviation
    dof = float((len(depths) - 2) * (num_units - 1))
    return line, math.sqrt(float((residual**2).sum()) / dof / num_units), dof


def _line(depths: Sequence[int], value: Floats) -> Floats:
    """[K, K] projection of relative costs on straight lines over depth; row sums are line / cell."""
    columns = np.stack([np.ones(len(depths)), np.asarray(depths, dtype=float)], axis=1) / np.exp(value)[:, None]
    return np.asarray(columns @ np.linalg.pinv(columns))


def line_over(depths: Sequence[int], cost: Floats) -> Floats:
    """[K]: the straight line through the costs, in their unit; relative errors are minimised."""
    return np.asarray(cost * _line(depths, np.log(cost)).sum(axis=1))


def line_without_each(depths: Sequence[int], cost: Floats) -> Floats:
    """[K]: the cost of each depth by the line through the OTHER depths."""
    return np.asarray(cost * (1.0 - _relative_offset(_line(depths, np.log(cost)))))


def _relative_offset(line: Floats) -> Floats:
    """[K]: the share of its cost by which each cell lies above the line through the others."""
    return np.asarray((1.0 - line.sum(axis=1)) / np.maximum(1e-9, 1.0 - np.diag(line)))


def _weight_of_cells(offset: Floats, noise: float, num_depths: int) -> float:
    """w: the share of a cell's distance from the line that is kept."""
    if num_depths <= 2 or noise <= ROUNDING_NOISE:
        return 1.0
    tau_squared = max(LEAST_STEP**2, float((offset**2).sum()) / (num_depths - 2))
    return tau_squared / (tau_squared + noise**2)


def _find_outliers(depths: Sequence[int], value: Floats, noise: float, dof: float) -> list[Contradiction]:
    """Cells off the line through the others; the worst is removed first, since it pulls the line away from the rest."""
    outliers: list[Contradiction] = []
    remaining = list(range(len(depths)))
    while len(remaining) > 2 and noise > ROUNDING_NOISE:
        line = _line([depths[i] for i in remaining], value[remaining])
        deviation = _relative_offset(line)
        sureness = np.abs(deviation) * np.sqrt(np.maximum(1e-9, 1.0 - np.diag(line))) / noise
        worst = int(sureness.argmax())
        limit = student_quantile(1.0 - (1.0 - CONFIDENCE) / 2.0 / len(depths), dof)
        if sureness[worst] <= limit or abs(deviation[worst]) < MIN_DEVIATION:
            break
        outliers.append(Contradiction(depths[remaining.pop(worst)], float(deviation[worst]), False))
    return outliers


def _make_monotone(
    depths: Sequence[int], log_ratio: Floats, loading: Floats, own_error: Floats, num_units: int
) -> tuple[Floats, Floats, list[Contradiction]]:
    """Neighbours that fall within chance share their mean (pool adjacent violators); other falls are returned."""
    falls, blocks = [], [[0]]
    for i in range(1, len(depths)):
        drop = float(log_ratio[i] - log_ratio[i - 1])
        variance = float(((loading[i] - loading[i - 1]) ** 2).sum() + own_error[i] ** 2 + own_error[i - 1] ** 2)
        spread = math.sqrt(variance)
        blocks.append([i])
        is_real = spread <= ROUNDING_NOISE or student_cdf(drop / spread, num_units - 1.0) < 1.0 - CONFIDENCE
        if drop < -ROUNDING_NOISE and is_real:
            falls.append(Contradiction(depths[i], drop, True))
            blocks[-1] = [-1, i]  # a barrier: a real fall is not averaged with the depth before it
            continue
        while (
            len(blocks) > 1
            and blocks[-1][0] != -1
            and _block_mean(log_ratio, blocks[-1]) < _block_mean(log_ratio, blocks[-2])
        ):
            last = blocks.pop()
            blocks[-1] += last
    share = np.zeros((len(depths), len(depths)))
    for block in blocks:
        members = [i for i in block if i >= 0]
        share[np.ix_(members, members)] = 1.0 / len(members)
    return share @ log_ratio, share @ loading, falls


def _block_mean(values: Floats, block: Sequence[int]) -> float:
    return float(np.mean([values[i] for i in block if i >= 0]))
