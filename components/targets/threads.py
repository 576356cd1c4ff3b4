"""How many threads a pass over a target deserves.

A pass of a small model is hundreds of operators of a few microseconds; a second thread saves little of each and waits
at a barrier after each, and on a busy machine that wait costs far more than it saves (measured: 31 CPU seconds instead
of 3 for one shard of answers of the built-in target). Depends on nothing measured when it runs, so that steps whose
files must repeat bit for bit get the same count everywhere.
"""

from __future__ import annotations

from typing import Final

SMALL_TARGET: Final = 50_000_000
"""Parameters below which one thread is enough."""


def threads_for(num_params: int, num_threads: int) -> int:
    """One thread for a small target, else all of `num_threads`."""
    return 1 if num_params < SMALL_TARGET else num_threads
