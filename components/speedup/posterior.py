"""Posterior of the speedup of every depth of every drafter, from prediction and measurement.

Both are log speedups. The prediction p has the covariance of its costs (processes) and of the model itself:
    C = cost + MODEL_OWN^2 I + MODEL_SHARED^2 (1 within a drafter)
MODEL_SHARED is the model's error that all depths of a drafter share (work between the timed phases): an offset of the
measured depths thereby carries over to the others. MODEL_OWN is its error of one depth. The measurement y of some
depths, M theta, has the covariance R of its prompts and processes. Each is weighted by its precision, which for normal
errors is the update of Kalman (1960):
    theta = p + G (y - M p),   G = C M^T (M C M^T + R)^-1
Acceptance is common to both: the ratio of acceptance lengths, in the same draws of prompts, carries the measured
speedup from its own prompts to all that have maps, so that the cost of a round is combined. Draws of both that are
updated by the same G are draws of theta (Evensen 1994), in which depths are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Floats

MODEL_SHARED = 0.05
MODEL_OWN = 0.02
LEAST_VARIANCE = 1e-12  # floor for measurements that do not vary at all


class PredictedDepth(NamedTuple):
    """The prediction of one depth of one drafter, on the log scale.

    length: [draws] of AL over all mapped prompts. cost: [draws] of a round over a plain step.
    """

    draft_key: str
    depth_k: int
    length: Floats
    cost: Floats


class MeasuredDepth(NamedTuple):
    """The measurement of one depth. speed_of_round: [draws] of log(speedup / AL) over the measured prompts."""

    draft_key: str
    depth_k: int
    speed_of_round: Floats


def combine(predicted: Sequence[PredictedDepth], measured: Sequence[MeasuredDepth], seed: int) -> Floats:
    """[draws, n] speedups of the predicted depths, given the measurements. measured: some of the predicted depths."""
    rng = np.random.default_rng([seed, 5])
    lengths = np.stack([depth.length for depth in predicted], axis=1)
    cost = np.stack([depth.cost for depth in predicted], axis=1)
    drafters = [depth.draft_key for depth in predicted]
    alike = np.array([[a == b for b in drafters] for a in drafters], dtype=float)
    model = MODEL_SHARED**2 * alike + MODEL_OWN**2 * np.eye(len(drafters))
    error = rng.standard_normal(cost.shape) @ np.linalg.cholesky(model).T
    prior = error - cost
    if not measured:
        return np.exp(lengths + prior)
    index = [next(i for i, p in enumerate(predicted) if p[:2] == m[:2]) for m in measured]
    speed_of_round = np.stack([depth.speed_of_round for depth in measured], axis=1)
    before = model + np.atleast_2d(np.cov(cost, rowvar=False))
    chance = _exchangeable(np.atleast_2d(np.cov(speed_of_round, rowvar=False)))
    observed = speed_of_round.mean(axis=0) + rng.standard_normal(speed_of_round.shape) @ np.linalg.cholesky(chance).T
    gain = np.linalg.solve(before[np.ix_(index, index)] + chance, before[index, :]).T
    return np.exp(lengths + prior + (observed - prior[:, index]) @ gain.T)


def _exchangeable(covariance: Floats) -> Floats:
    """The covariance with one common variance and one common covariance of all arms. Three processes determine no more:
    their covariance has rank two, and weights from it would follow its accidents."""
    num = len(covariance)
    variance = float(np.trace(covariance)) / num
    shared = (float(covariance.sum()) - num * variance) / (num * (num - 1)) if num > 1 else 0.0
    shared = min(max(shared, 0.0), 0.99 * variance)
    return np.asarray(np.full((num, num), shared) + (max(variance - shared, LEAST_VARIANCE)) * np.eye(num))
