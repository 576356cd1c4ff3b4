"""One time from repeated timings of the same work. Other work on a machine makes a time longer, never shorter.

So the longest timings say how busy the machine was, and the shortest how long the work takes. On a machine that nobody
else asked anything of, slices of plain decoding still scattered by a third, for neighbours share its memory. Beside a
load that came and went on one core, the cost of a round over a plain step differed between processes by 4.4 % by the
mean of the lower half of 55 slices, by 3.4 % by that of the lowest quarter and by 1.8 % by that of the lowest tenth.
The minimum alone is as steady there, and falls on as timings are added.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

PARTS: Final = 10  # the shortest tenth of the timings counts
LEAST: Final = 3  # timings, but never more than half of them


def steady(times: ArrayLike) -> float:
    """The mean of the shortest tenth of `times`, in their unit, of at least three of them or, of few, the lower half.

    NaN are left out (NaN where nothing else is there); of an odd number, the middle one belongs to the lower half.
    """
    known = np.asarray(times, dtype=np.float64).ravel()
    known = np.sort(known[~np.isnan(known)])
    count = max(-(-len(known) // PARTS), min(LEAST, -(-len(known) // 2)))
    return float(known[:count].mean()) if count else math.nan
