"""State of a measurement that is still running: the best arm so far, and the arms that may still beat it.

For each pair of arms the log of their speed ratio is (acceptance, paired by prompt) - (cost, paired by process):
    d = log S_best - log S_a = (log AL_best - log AL_a) - (mean_s x_best,s - mean_s x_a,s)
x_as is the log of arm a's round over plain decoding in process s, so that plain decoding cancels. Its half-width is
Student's quantile times the root of both variances, with Welch and Satterthwaite's degrees of freedom. Three processes
give a variance two degrees of freedom and t = 4.3; the scatter of processes about what they share is alike for arms, so
it is pooled over all arms but those that clearly scatter more. Sums only: cheap enough to evaluate every second.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.speedup.bootstrap import Floats, ratio_influence, sample_of
from components.speedup.student import student_quantile

PRECISION = 0.03  # half-width of a speed ratio's interval at which arms without a shown difference count as alike
SUSPICIOUS = 8.0  # times the median variance over processes: chance exceeds it in one of 50 arms of three processes
FEW_ARMS, FEW_PROCESSES = 4, 3  # fewer than these do not show which arm is odd
BAND = 0.01  # arms within this share of the best are as good


class ArmStanding(NamedTuple):
    """One arm against the best. by: log of the best arm's speed over its own. half_width: of the 95 % interval of `by`,
    infinite with fewer than two prompts or processes. state: best | worse | equivalent | open."""

    by: float
    half_width: float
    state: str


class Settled(NamedTuple):
    """State of a measurement. arms_to_measure: indices of the arms that need more processes, the best among them."""

    is_settled: bool
    best: int
    standings: list[ArmStanding]
    arms_to_measure: list[int]


def settled(
    cost: Floats, tokens: Floats, rounds: Floats, band: float = BAND, precision: float = PRECISION, level: float = 0.95
) -> Settled:
    """The state of a measurement.

    cost: [arms, processes], log of a round over a plain step in each process; NaN where a process has not timed an arm.
    tokens, rounds: [arms, prompts], of the same prompts for all arms.
    """
    length = tokens.sum(axis=1) / rounds.sum(axis=1)
    scatter = _scatter(cost)
    speed = np.log(length) - scatter.mean
    best = int(speed.argmax())
    influence = ratio_influence(tokens.T, rounds.T).T / length[:, None]
    standings = []
    for a in range(len(cost)):
        if a == best:
            standings.append(ArmStanding(0.0, 0.0, "best"))
            continue
        cost_difference = cost[best] - cost[a]
        shared = ~np.isnan(cost_difference)
        log_ratio = float(np.log(length[best] / length[a]) - cost_difference[shared].mean()) if shared.any() else 0.0
        slope = influence[best] - influence[a]
        sample = sample_of(rounds[a] + rounds[best], slope)
        prompts = float((slope**2).sum()) * sample.inflation
        parts = [
            (prompts, sample.dof),
            _process_variance(cost_difference[shared], scatter, bool(scatter.is_odd[[a, best]].any())),
        ]
        half_width = _half_width(parts, level) if tokens.shape[1] > 1 and shared.any() else math.inf
        standings.append(ArmStanding(log_ratio, half_width, _state_of(log_ratio, half_width, band, precision)))
    open_ = [a for a, c in enumerate(standings) if c.state == "open"]
    return Settled(not open_, best, standings, sorted({best, *open_}) if open_ else [])


def half_widths(cost: Floats, level: float = 0.95) -> Floats:
    """[arms]: half-width of the interval of each arm's mean log cost over plain decoding; infinite with one process.

    cost: as in `settled`. The scatter that arms share is that of plain decoding; the rest is pooled over arms.
    """
    scatter = _scatter(cost)
    if cost.shape[1] < 2 or not scatter.dof:
        return np.full(len(cost), math.inf)
    num = (~np.isnan(cost)).sum(axis=1)
    shared = np.nanmean(cost - np.nanmean(cost, axis=1, keepdims=True), axis=0)
    common, dof = float(shared.var(ddof=1)), cost.shape[1] - 1.0
    parts = [[(common / n, dof), (scatter.pooled / n, scatter.dof)] if n > 1 else [(math.inf, 1.0)] for n in num]
    return np.array([_half_width(of_one, level) for of_one in parts])


class _Scatter(NamedTuple):
    """Scatter of arms over processes. mean: [arms], without effects of processes. pooled: variance of one arm in one
    process about both. dof: its degrees of freedom. is_odd: [arms], whether one scatters far more than the others."""

    mean: Floats
    pooled: float
    dof: float
    is_odd: NDArray[np.bool_]


def _scatter(cost: Floats) -> _Scatter:
    timed = ~np.isnan(cost)
    filled = np.where(timed, cost, 0.0)
    arm, process = np.zeros(cost.shape[0]), np.zeros(cost.shape[1])
    for _ in range(1 if timed.all() else 30):
        arm = np.where(timed, filled - process, 0.0).sum(axis=1) / np.maximum(1, timed.sum(axis=1))
        process = np.where(timed, filled - arm[:, None], 0.0).sum(axis=0) / np.maximum(1, timed.sum(axis=0))
    rest = np.where(timed, filled - arm[:, None] - process, 0.0)
    squares = (rest**2).sum(axis=1)
    can_tell = min(cost.shape[0] / FEW_ARMS, cost.shape[1] / FEW_PROCESSES) >= 1.0
    is_odd = (squares > SUSPICIOUS * np.median(squares)) & can_tell
    whole = float(timed.sum() - cost.shape[0] - timed.any(axis=0).sum() + 1)
    dof = whole * float((~is_odd).mean())
    return _Scatter(arm, float(squares[~is_odd].sum()) / dof if dof >= 1.0 else math.nan, dof, is_odd)


def _process_variance(difference: Floats, scatter: _Scatter, is_odd: bool) -> tuple[float, float]:
    """(variance of the mean difference of two arms, degrees of freedom); infinite with one process."""
    num = len(difference)
    if num < 2 or scatter.dof < 1.0:
        return math.inf, 1.0
    if is_odd:
        return float(difference.var(ddof=1)) / num, num - 1.0
    return 2.0 * scatter.pooled / num, scatter.dof


def _half_width(parts: list[tuple[float, float]], level: float) -> float:
    whole = sum(variance for variance, _ in parts)
    if not math.isfinite(whole):
        return math.inf
    if whole == 0.0:
        return 0.0
    dof = whole**2 / sum(variance**2 / dof for variance, dof in parts)
    return student_quantile((1.0 + level) / 2.0, dof) * math.sqrt(whole)


def _state_of(by: float, half_width: float, band: float, precision: float) -> str:
    if by - half_width > 0.0:
        return "worse"
    return "equivalent" if by + half_width <= band or half_width <= precision else "open"
