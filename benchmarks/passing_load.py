"""Other work on one core that comes and goes, for benchmarks of how well a measurement stands it.

    python -m benchmarks.passing_load SEED

Works for 2 to 12 seconds, rests for 1 to 8, and so on until it is ended; which, and how long, follows from the seed.
Half of the work is arithmetic, half of it goes through more memory than caches hold.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np

WORK_SECONDS = (2.0, 12.0)
REST_SECONDS = (1.0, 8.0)


def main() -> None:
    """Work and rest for ever."""
    dice = random.Random(int(sys.argv[1]))
    large = np.zeros(1 << 23)
    while True:
        until = time.monotonic() + dice.uniform(*WORK_SECONDS)
        while time.monotonic() < until:
            sum(number * number for number in range(20_000))
            large += 1.0
        time.sleep(dice.uniform(*REST_SECONDS))


if __name__ == "__main__":
    main()
