"""A process that is killed before one of its changes to the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def die_before(call: int, *changes: str) -> None:
    """This process is killed before its call-th call of these functions of os ("replace", "unlink", ...)."""
    calls = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return made

    for name in changes:
        setattr(os, name, counted(getattr(os, name)))
