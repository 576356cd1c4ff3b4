"""Starts a part of `up` so that it cannot outlive its supervisor: `python -m flows.services.child PID COMMAND ...`.

Linux sends the part SIGTERM when process PID dies, however it dies. The setting survives the exec that follows. The
workers of steps and the temporary server of `draftsmith run` use the same setting (`end_with`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Set an option of this process (`man 2 prctl`); does nothing where the system is not Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def end_with(parent: int, number: int) -> bool:
    """Have the system send this process signal `number` when its parent dies; False where it is dead already."""
    prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def bound(command: Iterable[str]) -> list[str]:
    """The command line that runs a command as a process which cannot outlive this one."""
    return [sys.executable, "-m", "flows.services.child", str(os.getpid()), *command]


def stop(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End a process that this one has started: politely, and once the time is over whether it will or not."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if end_with(parent, signal.SIGTERM):
        os.execvpe(command[0], command, os.environ)


if __name__ == "__main__":
    main()
