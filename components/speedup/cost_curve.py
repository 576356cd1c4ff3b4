"""What a round costs over depth, as a curve: noise in single cells is ironed out, a step that all processes show stays.

x_ks is the log of a round's time at depth k over plain decoding's, in process s (or, where one process was all, in one
part of its blocks). Over depth the ratio is close to a straight line: each draft adds its own time and a row to verify.
Empirical Bayes (after Efron & Morris 1973) draws each depth towards the line:
    curve_k = w cell_k + (1 - w) line_k,   w = tau^2 / (tau^2 + se^2)
with se^2 the chance in one cell, from how processes differ about the line beyond a shift and a tilt of their own, and
tau^2 the spread of the cells about the line, at least LEAST_STEP^2. Taking se^2 off that spread, as James and Stein do,
loses more where a step is real than it gains where there is none (tests/components/speedup/test_known_truth.py). What
processes share (a plain baseline that was slow in one of them) moves the whole line and is no reason to doubt its
shape. Deeper rounds do more work, so the curve never falls, unless the data show that it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Floats
from components.speedup.student import student_cdf, student_quantile

LEAST_STEP = 0.005  # kernels are never taken to be smoother over depth than this share of a round
SURE = 0.99  # how sure the depths of a drafter must be, taken together, that one of them contradicts their curve
NOTHING = 1e-9  # a noise of rounding alone
WORTH_MEASURING = 0.02  # ... and by how much of a round's time; less moves no choice


class Contradiction(NamedTuple):
    """A depth whose cost does not fit the curve through the others by more than chance. by: share of its time."""

    depth_k: int
    by: float
    falls: bool  # a deeper round costs less than a shallower one; otherwise it is off the line


class Curve(NamedTuple):
    """Log cost ratios over depth, with what each process does to them.

    log_ratio: [K]. process: [K, units], loadings as in bootstrap.Estimate; the last K columns are each depth's own.
    free: degrees of freedom of that variance at each depth, [K].
    """

    log_ratio: Floats
    process: Floats
    free: Floats
    contradictions: list[Contradiction]


def cost_curve(depths: Sequence[int], by_unit: Floats, whole: Floats | None = None) -> Curve:
    """The curve through measured costs.

    depths: K of them, ascending, from 1 up. by_unit: [K, units], log ratios in each unit, NaN where one did not measure
    a depth. whole: [K], over all that was measured; None: the mean over units. With fewer than two units nothing is
    known of chance, and the cells stand as they are.
    """
    num_depths, num_units = by_unit.shape
    if num_units < 2:
        assert whole is not None, "without units there is nothing to take a mean of"
        return Curve(whole, np.zeros((num_depths, 0)), np.full(num_depths, math.inf), [])
    mean, deviation = _fitted(by_unit)
    value = mean if whole is None else whole
    line, noise, noise_free = _line_and_noise(depths, value, deviation)
    offset = np.log(line.sum(axis=1))  # of the line from each cell: the fit to cells of relative size 1
    weight = _weight_of_cells(offset, noise, num_depths)
    smooth = weight * np.eye(num_depths) + (1.0 - weight) * line
    log_ratio = value + np.log(weight + (1.0 - weight) * line.sum(axis=1))
    count = (~np.isnan(by_unit)).sum(axis=1, keepdims=True).astype(float)
    loading = smooth @ (deviation / np.sqrt(count * np.maximum(1.0, count - 1.0)))
    own = np.full(num_depths, math.sqrt(weight * (1.0 - weight)) * noise)
    if num_depths <= 2:
        noise_free = math.inf
    off = _off_the_line(depths, value, noise, noise_free)
    log_ratio, loading, falls = _never_falling(depths, log_ratio, loading, own, num_units)
    variance, own_variance = (loading**2).sum(axis=1), own**2
    spread = variance**2 / (num_units - 1) + own_variance**2 / max(1.0, noise_free)
    free = np.where(spread > 0.0, (variance + own_variance) ** 2 / np.where(spread > 0.0, spread, 1.0), math.inf)
    return Curve(log_ratio, np.concatenate([loading, np.diag(own)], axis=1), free, _told_once(depths, off, falls))


def _told_once(
    depths: Sequence[int], off: Sequence[Contradiction], falls: Sequence[Contradiction]
) -> list[Contradiction]:
    """Each depth once. A fall is told of the deeper depth, or of the one before it where that one is off the line."""
    found = {one.depth_k: one for one in off}
    for fall in falls:
        before = depths[depths.index(fall.depth_k) - 1]
        if before not in found or fall.depth_k in found:
            found[fall.depth_k] = fall
    return [found[depth] for depth in sorted(found)]


def _fitted(by_unit: Floats) -> tuple[Floats, Floats]:
    """(mean at each depth, each unit's deviation from it, 0 where it did not measure). A unit that measured other
    depths than the rest must not make these look slow, so depths and units are fitted together."""
    known = ~np.isnan(by_unit)
    filled = np.where(known, by_unit, 0.0)
    unit, depth = np.zeros(by_unit.shape[1]), np.zeros(by_unit.shape[0])
    for _ in range(1 if known.all() else 50):
        depth = np.where(known, filled - unit, 0.0).sum(axis=1) / known.sum(axis=1)
        unit = np.where(known, filled - depth[:, None], 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
        unit -= unit.mean()
    return depth, np.where(known, filled - depth[:, None], 0.0)


def _line_and_noise(depths: Sequence[int], value: Floats, deviation: Floats) -> tuple[Floats, float, float]:
    """The projection on straight lines, [K, K] in relative units; the standard error of one cell; its freedom."""
    if len(depths) <= 2:
        return np.eye(len(depths)), 0.0, math.inf
    line = _line(depths, value)
    num_units = deviation.shape[1]
    about = deviation - line @ deviation
    free = float((len(depths) - 2) * (num_units - 1))
    return line, math.sqrt(float((about**2).sum()) / free / num_units), free


def _line(depths: Sequence[int], value: Floats) -> Floats:
    """The projection of relative sizes of cells on straight lines over depth; its row sums are the line over a cell."""
    columns = np.stack([np.ones(len(depths)), np.asarray(depths, dtype=float)], axis=1) / np.exp(value)[:, None]
    return np.asarray(columns @ np.linalg.pinv(columns))


def line_over(depths: Sequence[int], cost: Floats) -> Floats:
    """[K]: the straight line through costs of depths, in their unit; each weighs by its relative error."""
    return np.asarray(cost * _line(depths, np.log(cost)).sum(axis=1))


def line_without_each(depths: Sequence[int], cost: Floats) -> Floats:
    """[K]: what the line through the OTHER depths says that each costs."""
    return np.asarray(cost * (1.0 - _off(_line(depths, np.log(cost)))))


def _off(line: Floats) -> Floats:
    """[K]: the share of its cost by which each cell lies above the line through the others."""
    return np.asarray((1.0 - line.sum(axis=1)) / np.maximum(1e-9, 1.0 - np.diag(line)))


def _weight_of_cells(offset: Floats, noise: float, num_depths: int) -> float:
    """w: how much of a cell's distance from the line is kept."""
    if num_depths <= 2 or noise <= NOTHING:
        return 1.0
    tau_squared = max(LEAST_STEP**2, float((offset**2).sum()) / (num_depths - 2))
    return tau_squared / (tau_squared + noise**2)


def _off_the_line(depths: Sequence[int], value: Floats, noise: float, free: float) -> list[Contradiction]:
    """Cells that lie off the line through the others, the worst first: it also pulls the line away from the rest."""
    found: list[Contradiction] = []
    kept = list(range(len(depths)))
    while len(kept) > 2 and noise > NOTHING:
        line = _line([depths[i] for i in kept], value[kept])
        by = _off(line)
        sureness = np.abs(by) * np.sqrt(np.maximum(1e-9, 1.0 - np.diag(line))) / noise
        worst = int(sureness.argmax())
        limit = student_quantile(1.0 - (1.0 - SURE) / 2.0 / len(depths), free)
        if sureness[worst] <= limit or abs(by[worst]) < WORTH_MEASURING:
            break
        found.append(Contradiction(depths[kept.pop(worst)], float(by[worst]), False))
    return found


def _never_falling(
    depths: Sequence[int], log_ratio: Floats, loading: Floats, own: Floats, num_units: int
) -> tuple[Floats, Floats, list[Contradiction]]:
    """Neighbours that fall by no more than chance share their mean (pool adjacent violators); others are told."""
    falls, blocks = [], [[0]]
    for i in range(1, len(depths)):
        drop = float(log_ratio[i] - log_ratio[i - 1])
        spread = math.sqrt(float(((loading[i] - loading[i - 1]) ** 2).sum() + own[i] ** 2 + own[i - 1] ** 2))
        blocks.append([i])
        if drop < -NOTHING and (spread <= NOTHING or student_cdf(drop / spread, num_units - 1.0) < 1.0 - SURE):
            falls.append(Contradiction(depths[i], drop, True))
            blocks[-1] = [-1, i]  # a wall: what is shown to fall is not averaged with what it falls from
            continue
        while len(blocks) > 1 and blocks[-1][0] != -1 and _mean(log_ratio, blocks[-1]) < _mean(log_ratio, blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    share = np.zeros((len(depths), len(depths)))
    for block in blocks:
        members = [i for i in block if i >= 0]
        share[np.ix_(members, members)] = 1.0 / len(members)
    return share @ log_ratio, share @ loading, falls


def _mean(values: Floats, block: Sequence[int]) -> float:
    return float(np.mean([values[i] for i in block if i >= 0]))
