"""A clock that stands wrong by the seconds in the file $WRONG_CLOCK, at every look; Python loads this at its start.

Only the clock that a person can set: time.monotonic and the times of files stay right. libfaketime would do it below
Python, but refuses sleeps that wait for a moment of the monotonic clock, as time.sleep does.
"""

import os
import time

_time, _time_ns = time.time, time.time_ns


def _offset_s() -> int:
    with open(os.environ["WRONG_CLOCK"]) as file:
        return int(file.read())


def _wrong_time() -> float:
    return _time() + _offset_s()


def _wrong_time_ns() -> int:
    return _time_ns() + _offset_s() * 10**9


time.time, time.time_ns = _wrong_time, _wrong_time_ns
