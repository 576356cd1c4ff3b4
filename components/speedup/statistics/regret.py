"""Choice among several speeds in paired draws: candidates as good as the best, by their loss.

In one draw every candidate has the same prompts and processes, so what is slow for all of them cancels; separate bounds
do not use that. The loss of a candidate in a draw is 1 - its speed / that of the best.
"""

from __future__ import annotations

import numpy as np

from components.speedup.statistics.bootstrap import Floats


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
