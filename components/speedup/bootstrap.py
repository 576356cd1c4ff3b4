"""How sure we are: joint resampling of prompts (acceptance) and of timing blocks (cost).

Prompts, not rounds, are resampled: rounds of one answer are alike, and intervals over rounds come out up to 27 times
too narrow. One draw of prompts serves every depth and every drafter, so that differences are paired. Efron & Tibshirani
1993, percentile intervals; at a dozen prompts they are a little narrow, which the `few_prompts` flag says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def draw_weights(num_units: int, num_draws: int, rng: np.random.Generator) -> Floats:
    """[num_draws, num_units]: how often each unit occurs in each resample of num_units units."""
    assert num_units > 0
    return rng.multinomial(num_units, np.full(num_units, 1.0 / num_units), size=num_draws).astype(np.float64)


def ratio_draws(weights: Floats, above: Floats, below: Floats) -> Floats:
    """Pooled ratio sum(above) / sum(below) in each resample. above, below: [units] or [units, n]; -> [draws(, n)]."""
    return (weights @ above) / (weights @ below)


def median_draws(values: Floats, num_draws: int, rng: np.random.Generator) -> Floats:
    """Medians over resampled blocks. values: [n, blocks], NaN = not measured; -> [num_draws, n].

    The same blocks are drawn for every row, because the arms of one block ran side by side and drift together. A cell
    missing in one block stands in with its own median, so that it neither helps nor hurts.
    """
    filled = np.where(np.isnan(values), np.nanmedian(values, axis=1, keepdims=True), values)
    picks = rng.integers(0, values.shape[1], size=(num_draws, values.shape[1]))
    return np.median(filled[:, picks], axis=2).T


def interval(draws: Floats, level: float = 0.95) -> tuple[float, float]:
    """The central percentile interval of one quantity's draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
