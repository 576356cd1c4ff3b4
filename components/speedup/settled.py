"""Whether a measurement that is still running has decided: which contender is the best, and who is still in question.

For each pair of arms the log of their speed ratio is (acceptance, paired by prompt) - (cost, paired by process):
    d = log S_best - log S_a = (log AL_best - log AL_a) - (mean_s x_best,s - mean_s x_a,s)
x_as is the log of arm a's round over plain decoding in process s, so that plain decoding cancels. Its half-width is
Student's quantile times the root of both variances, with Welch and Satterthwaite's degrees of freedom. Three processes
give a variance two degrees of freedom and t = 4.3; how processes scatter about what they share is alike for arms, so it
is pooled over all of them but those that clearly scatter more. Cheap enough to ask every second: sums only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.speedup.bootstrap import Floats, ratio_influence, sample_of
from components.speedup.student import student_quantile

PRECISION = 0.03  # half the width of a speed ratio's interval at which arms that are still not told apart are alike
SUSPICIOUS = 8.0  # times the median arm's variance over processes: so odd by chance is one arm in 50 of three processes
FEW_ARMS, FEW_PROCESSES = 4, 3  # fewer than these do not say which arm is odd
BAND = 0.01  # arms within this share of the best are as good


class Contender(NamedTuple):
    """One arm against the best. by: log of the best one's speed over its own; half_width: of the 95 % interval of `by`,
    infinite where fewer than two prompts or processes tell. state: best | worse | equivalent | open."""

    by: float
    half_width: float
    state: str


class Settled(NamedTuple):
    """Where a measurement stands. more: indices of the arms that need more, the best one among them."""

    is_settled: bool
    best: int
    contenders: list[Contender]
    more: list[int]


def settled(
    cost: Floats, tokens: Floats, rounds: Floats, band: float = BAND, precision: float = PRECISION, level: float = 0.95
) -> Settled:
    """The state of the decision.

    cost: [arms, processes], log of a round over a plain step in each process; NaN where a process has not timed an arm.
    tokens, rounds: [arms, prompts], of the same prompts for all arms.
    """
    length = tokens.sum(axis=1) / rounds.sum(axis=1)
    scatter = _scatter(cost)
    speed = np.log(length) - scatter.mean
    best = int(speed.argmax())
    influence = ratio_influence(tokens.T, rounds.T).T / length[:, None]
    contenders = []
    for a in range(len(cost)):
        if a == best:
            contenders.append(Contender(0.0, 0.0, "best"))
            continue
        apart = cost[best] - cost[a]
        shared = ~np.isnan(apart)
        by = float(np.log(length[best] / length[a]) - apart[shared].mean()) if shared.any() else 0.0
        slope = influence[best] - influence[a]
        sample = sample_of(rounds[a] + rounds[best], slope)
        prompts = float((slope**2).sum()) * sample.inflation
        parts = [(prompts, sample.free), _by_processes(apart[shared], scatter, bool(scatter.is_odd[[a, best]].any()))]
        half_width = _half_width(parts, level) if tokens.shape[1] > 1 and shared.any() else math.inf
        contenders.append(Contender(by, half_width, _state(by, half_width, band, precision)))
    open_ = [a for a, c in enumerate(contenders) if c.state == "open"]
    return Settled(not open_, best, contenders, sorted({best, *open_}) if open_ else [])


def half_widths(cost: Floats, level: float = 0.95) -> Floats:
    """[arms]: half the width of each arm's interval of its mean log cost over plain decoding; infinite of one process.

    cost: as in `settled`. What processes share is plain decoding's own scatter, the rest is pooled over arms.
    """
    scatter = _scatter(cost)
    if cost.shape[1] < 2 or not scatter.free:
        return np.full(len(cost), math.inf)
    num = (~np.isnan(cost)).sum(axis=1)
    shared = np.nanmean(cost - np.nanmean(cost, axis=1, keepdims=True), axis=0)
    common, free = float(shared.var(ddof=1)), cost.shape[1] - 1.0
    parts = [[(common / n, free), (scatter.pooled / n, scatter.free)] if n > 1 else [(math.inf, 1.0)] for n in num]
    return np.array([_half_width(of_one, level) for of_one in parts])


class _Scatter(NamedTuple):
    """How arms scatter over processes. mean: [arms], beside what processes share. pooled: variance of one arm in one
    process about both, free: its degrees of freedom. is_odd: [arms], those that scatter far more than the others."""

    mean: Floats
    pooled: float
    free: float
    is_odd: NDArray[np.bool_]


def _scatter(cost: Floats) -> _Scatter:
    known = ~np.isnan(cost)
    filled = np.where(known, cost, 0.0)
    arm, process = np.zeros(cost.shape[0]), np.zeros(cost.shape[1])
    for _ in range(1 if known.all() else 30):
        arm = np.where(known, filled - process, 0.0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
        process = np.where(known, filled - arm[:, None], 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
    rest = np.where(known, filled - arm[:, None] - process, 0.0)
    own = (rest**2).sum(axis=1)
    can_tell = min(cost.shape[0] / FEW_ARMS, cost.shape[1] / FEW_PROCESSES) >= 1.0
    is_odd = (own > SUSPICIOUS * np.median(own)) & can_tell
    whole = float(known.sum() - cost.shape[0] - known.any(axis=0).sum() + 1)
    free = whole * float((~is_odd).mean())
    return _Scatter(arm, float(own[~is_odd].sum()) / free if free >= 1.0 else math.nan, free, is_odd)


def _by_processes(difference: Floats, scatter: _Scatter, is_odd: bool) -> tuple[float, float]:
    """(variance of the mean difference of two arms, degrees of freedom); infinite where one process is all."""
    num = len(difference)
    if num < 2 or scatter.free < 1.0:
        return math.inf, 1.0
    if is_odd:
        return float(difference.var(ddof=1)) / num, num - 1.0
    return 2.0 * scatter.pooled / num, scatter.free


def _half_width(parts: list[tuple[float, float]], level: float) -> float:
    whole = sum(variance for variance, _ in parts)
    if not math.isfinite(whole):
        return math.inf
    if whole == 0.0:
        return 0.0
    free = whole**2 / sum(variance**2 / free for variance, free in parts)
    return student_quantile((1.0 + level) / 2.0, free) * math.sqrt(whole)


def _state(by: float, half_width: float, band: float, precision: float) -> str:
    if by - half_width > 0.0:
        return "worse"
    return "equivalent" if by + half_width <= band or half_width <= precision else "open"
