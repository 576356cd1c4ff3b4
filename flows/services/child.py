"""Starts a part of `up` so that it cannot outlive its supervisor: `python -m flows.services.child PID COMMAND ...`.

Linux sends the part SIGTERM when process PID dies, however it dies. The setting survives the exec that follows.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == parent:  # else it died before the line above
        os.execvpe(command[0], command, os.environ)


if __name__ == "__main__":
    main()
