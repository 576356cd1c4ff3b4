"""Which of several speeds to take: the smallest that is as good as the best, judged in paired draws.

In one draw every candidate meets the same prompts and processes, so what is slow for all of them cancels; bounds that
are taken one by one know nothing of that. The loss of a candidate in a draw is 1 - its speed / the best one's.
"""

from __future__ import annotations

import numpy as np

from components.speedup.bootstrap import Floats


def losses(draws: Floats) -> Floats:
    """[draws, n] speeds -> the share of speed that each candidate loses to the best of the same draw."""
    return np.asarray(1.0 - draws / draws.max(axis=1, keepdims=True))


def p_best(draws: Floats) -> Floats:
    """[n]: the share of draws in which each candidate is the fastest."""
    return np.asarray(np.bincount(draws.argmax(axis=1), minlength=draws.shape[1]) / len(draws))


def near_best(draws: Floats, tolerance: float, confidence: float) -> list[int]:
    """The candidates that lose at most `tolerance` to the best in a share `confidence` of the draws, in their order.

    Where none is that sure, not even the best, the one that is expected to lose least.
    """
    lost = losses(draws)
    # A hair of room, so that speeds equal but for rounding count as equal.
    sure = (lost <= tolerance + 1e-12).mean(axis=0) >= confidence
    return [int(i) for i in np.flatnonzero(sure)] or [int(lost.mean(axis=0).argmin())]
