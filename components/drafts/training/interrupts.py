"""Interrupts of training: SIGTERM and SIGINT (Ctrl-C) wait for a checkpoint, and then do what they always do."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

HELD_BACK: Final = (signal.SIGTERM, signal.SIGINT)


class Interrupted(Exception):
    """Training has ended before its last step, since it was asked to; its checkpoint is written."""


@contextmanager
def held_back(ask_to_stop: Callable[[], object]) -> Iterator[None]:
    """Turn a first signal into a call of `ask_to_stop` and deliver it when the body has ended; a second one at once.

    Signals that are ignored stay so. Outside the main thread, where Python lets nobody handle signals, none is held.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in HELD_BACK}
    handlers = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    arrived: list[int] = []

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def hold(number: int, _: FrameType | None) -> None:
        arrived.append(number)
        restore()
        ask_to_stop()

    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        restore()
        for held in arrived:
            signal.raise_signal(held)
