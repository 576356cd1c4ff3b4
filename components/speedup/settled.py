"""Whether a measurement that is still running has decided: which contender is the best, and who is still in question.

For each pair of arms the log of their speed ratio is (acceptance, paired by prompt) - (cost, paired by process):
    d = log S_best - log S_a = (log AL_best - log AL_a) - (mean_s x_best,s - mean_s x_a,s)
x_as is the log of arm a's round over plain decoding in process s, so that plain decoding cancels. Its half-width is
Student's quantile times the root of both variances, with Welch and Satterthwaite's degrees of freedom. Three processes
give a variance two degrees of freedom and t = 4.3; how processes scatter about what they share is alike for arms, so it
is pooled over all of them, unless a pair differs more than the pool says. Cheap enough to ask every second: sums only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Floats, ratio_influence, sample_of
from components.speedup.student import student_quantile

PRECISION = 0.03  # half the width of a speed ratio's interval at which arms that are still not told apart are alike
SUSPICIOUS = 6.0  # times the pooled variance: about the 99th percentile of F with 2 and 14 degrees of freedom
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
    mean_cost, pooled, pooled_free = _fitted(cost)
    speed = np.log(length) - mean_cost
    best = int(speed.argmax())
    influence = ratio_influence(tokens.T, rounds.T).T / length[:, None]
    contenders = []
    for a in range(len(cost)):
        if a == best:
            contenders.append(Contender(0.0, 0.0, "best"))
            continue
        shared = ~np.isnan(cost[a] - cost[best])
        by = float(np.log(length[best] / length[a]) - (cost[best] - cost[a])[shared].mean()) if shared.any() else 0.0
        slope = influence[best] - influence[a]
        sample = sample_of(rounds[a] + rounds[best], slope)
        prompts = float((slope**2).sum()) * sample.inflation
        parts = [(prompts, sample.free), _by_processes((cost[best] - cost[a])[shared], pooled, pooled_free)]
        half_width = _half_width(parts, level) if tokens.shape[1] > 1 and shared.any() else math.inf
        contenders.append(Contender(by, half_width, _state(by, half_width, band, precision)))
    open_ = [a for a, c in enumerate(contenders) if c.state == "open"]
    return Settled(not open_, best, contenders, sorted({best, *open_}) if open_ else [])


def half_widths(cost: Floats, level: float = 0.95) -> Floats:
    """[arms]: half the width of each arm's interval of its mean log cost over plain decoding; infinite of one process.

    cost: as in `settled`. What processes share is plain decoding's own scatter, the rest is pooled over arms.
    """
    _, pooled, pooled_free = _fitted(cost)
    num = (~np.isnan(cost)).sum(axis=1)
    shared = np.nanmean(cost - np.nanmean(cost, axis=1, keepdims=True), axis=0)
    if cost.shape[1] < 2 or not pooled_free:
        return np.full(len(cost), math.inf)
    common = (float(shared.var(ddof=1)), cost.shape[1] - 1.0)
    parts = [[(common[0] / n, common[1]), (pooled / n, pooled_free)] if n > 1 else [(math.inf, 1.0)] for n in num]
    return np.array([_half_width(of_one, level) for of_one in parts])


def _fitted(cost: Floats) -> tuple[Floats, float, float]:
    """(mean of each arm beside what processes share, variance of an arm in a process about both, its freedom)."""
    known = ~np.isnan(cost)
    filled = np.where(known, cost, 0.0)
    arm, process = np.zeros(cost.shape[0]), np.zeros(cost.shape[1])
    for _ in range(1 if known.all() else 30):
        arm = np.where(known, filled - process, 0.0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
        process = np.where(known, filled - arm[:, None], 0.0).sum(axis=0) / np.maximum(1, known.sum(axis=0))
    rest = np.where(known, filled - arm[:, None] - process, 0.0)
    free = float(known.sum() - cost.shape[0] - known.any(axis=0).sum() + 1)
    return (arm, float((rest**2).sum()) / free, free) if free >= 1.0 else (arm, math.nan, 0.0)


def _by_processes(difference: Floats, pooled: float, pooled_free: float) -> tuple[float, float]:
    """(variance of the mean difference of two arms, degrees of freedom); infinite where one process is all."""
    num = len(difference)
    if num < 2 or not pooled_free:
        return math.inf, 1.0
    own, own_free = float(difference.var(ddof=1)), num - 1.0
    if own > SUSPICIOUS * 2.0 * pooled:
        return own / num, own_free
    return 2.0 * pooled / num, pooled_free


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
