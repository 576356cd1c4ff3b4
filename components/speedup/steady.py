"""One time from repeated timings of the same work. Other work on a machine makes a time longer, never shorter.

So the upper half of the timings says how busy the machine was, and the lower half how long the work takes. The mean of
the lower half is steadier than the minimum, which falls on as timings are added, and than a single quantile.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def steady(times: ArrayLike) -> float:
    """The mean of the lower half of `times`, in their unit (of an odd number, the middle one counts); NaN are left out.

    NaN where there is no time at all.
    """
    known = np.asarray(times, dtype=np.float64).ravel()
    known = np.sort(known[~np.isnan(known)])
    return float(known[: (len(known) + 1) // 2].mean()) if len(known) else math.nan
