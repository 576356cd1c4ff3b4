"""Compactions that are killed, one before each change they make to the disk: `python killed_compaction.py HISTORY OUT`.

OUT/0, OUT/1, ... are copies of HISTORY in which a compaction died just before its n-th rename or deletion; the last one
went through. One process imports everything and forks a child for each, before any library has started a thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage.history.segments import compact


def dies_before(call: int) -> None:
    """This process is killed before its call-th change to a directory."""
    calls = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return made

    os.replace, os.unlink = counted(os.replace), counted(os.unlink)


def main(history: Path, out: Path) -> None:
    for number in range(1, 200):
        folder = out / str(number)
        shutil.copytree(history, folder)
        child = os.fork()
        if not child:
            dies_before(number)
            compact(folder, 2)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
    raise SystemExit("a compaction that never ends")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
