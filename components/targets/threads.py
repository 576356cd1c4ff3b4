"""The thread count for passes of a target.

A pass of a small model is hundreds of operators of a few microseconds. A second thread saves little of each and waits
at a barrier after each, which on a busy machine costs far more (measured: 31 CPU seconds instead of 3 for one shard of
answers of the built-in target). The count depends on no measurement, so that files repeat bit for bit everywhere.
"""

from __future__ import annotations

from typing import Final

SMALL_TARGET: Final = 50_000_000
"""Parameters below which one thread is enough."""


def threads_for(num_params: int, num_threads: int) -> int:
    """One thread for a small target, else all of `num_threads`."""
    return 1 if num_params < SMALL_TARGET else num_threads
