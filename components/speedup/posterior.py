"""What prediction and measurement say together about every depth of every drafter.

Both are log speedups. The prediction p has the covariance of its costs (processes) and of the model itself:
    C = cost + MODEL_OWN^2 I + MODEL_SHARED^2 (1 within a drafter)
MODEL_SHARED is what the model misses of a drafter at every depth alike (work between the phases that were timed), so
that an offset which the measured depths show is carried over to the others; MODEL_OWN is what it misses of one depth.
The measurement y of some depths, M theta, has the covariance R of its prompts and processes. Each is weighed by its
precision, which for normal errors is the update of Kalman (1960):
    theta = p + G (y - M p),   G = C M^T (M C M^T + R)^-1
Acceptance is common to both: the measured speedup is carried from its own prompts to all that have maps by the ratio of
their acceptance lengths, in the same draws of prompts, so that what is combined is what a round costs. Draws of both
that are updated by the same G are draws of theta (Evensen 1994), on which depths are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.bootstrap import Floats

MODEL_SHARED = 0.05
MODEL_OWN = 0.02
LEAST_VARIANCE = 1e-12  # of what was measured without any chance at all


class Depth(NamedTuple):
    """One depth of one drafter, as predicted. All on the log scale.

    length: [draws], of AL over all mapped prompts; cost: [draws], of a round over a plain step.
    """

    draft_key: str
    depth_k: int
    length: Floats
    cost: Floats


class Found(NamedTuple):
    """The same as measured: log of speedup over AL of the prompts that were measured, [draws]."""

    draft_key: str
    depth_k: int
    speed_of_round: Floats


def combine(predicted: Sequence[Depth], measured: Sequence[Found], seed: int) -> Floats:
    """[draws, n] speedups of the predicted depths, given what was measured. measured: a choice of the same depths."""
    rng = np.random.default_rng([seed, 5])
    lengths = np.stack([one.length for one in predicted], axis=1)
    cost = np.stack([one.cost for one in predicted], axis=1)
    drafters = [one.draft_key for one in predicted]
    alike = np.array([[a == b for b in drafters] for a in drafters], dtype=float)
    model = MODEL_SHARED**2 * alike + MODEL_OWN**2 * np.eye(len(drafters))
    error = rng.standard_normal(cost.shape) @ np.linalg.cholesky(model).T
    prior = error - cost
    if not measured:
        return np.exp(lengths + prior)
    index = [next(i for i, p in enumerate(predicted) if p[:2] == m[:2]) for m in measured]
    found = np.stack([one.speed_of_round for one in measured], axis=1)
    before = model + np.atleast_2d(np.cov(cost, rowvar=False))
    chance = _alike(np.atleast_2d(np.cov(found, rowvar=False)))
    seen = found.mean(axis=0) + rng.standard_normal(found.shape) @ np.linalg.cholesky(chance).T
    gain = np.linalg.solve(before[np.ix_(index, index)] + chance, before[index, :]).T
    return np.exp(lengths + prior + (seen - prior[:, index]) @ gain.T)


def _alike(covariance: Floats) -> Floats:
    """One variance and one covariance for all arms. Three processes know no more: the rank of what they say is two, and
    weights that are taken from it follow its accidents."""
    num = len(covariance)
    variance = float(np.trace(covariance)) / num
    shared = (float(covariance.sum()) - num * variance) / (num * (num - 1)) if num > 1 else 0.0
    shared = min(max(shared, 0.0), 0.99 * variance)
    return np.asarray(np.full((num, num), shared) + (max(variance - shared, LEAST_VARIANCE)) * np.eye(num))
