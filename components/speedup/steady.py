"""One steady time from repeated timings of the same work. Other work on a machine makes a time longer, never shorter.

The longest timings show how busy the machine was, the shortest how long the work takes. On a machine without any other
task, slices of plain decoding still scattered by a third, since neighbours share its memory. With a load that came and
went on one core, the cost of a round over a plain step differed between processes by 4.4 % by the mean of the lower
half of 55 slices, by 3.4 % by that of the lowest quarter and by 1.8 % by that of the lowest tenth. The minimum is as
steady there, but keeps falling as timings are added.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

PARTS: Final = 10  # the shortest tenth of the timings counts
MIN_TIMINGS: Final = 3  # but never more than half of them


def steady(times: ArrayLike) -> float:
    """The mean of the shortest tenth of `times`, in their unit; of at least three or, of few, of the lower half.

    NaN are left out (NaN where all are). The middle one of an odd number belongs to the lower half.
    """
    values = np.asarray(times, dtype=np.float64).ravel()
    values = np.sort(values[~np.isnan(values)])
    count = max(-(-len(values) // PARTS), min(MIN_TIMINGS, -(-len(values) // 2)))
    return float(values[:count].mean()) if count else math.nan
