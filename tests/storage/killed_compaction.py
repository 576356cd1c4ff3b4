"""Compactions that are killed, one before each change they make to the disk: `python killed_compaction.py HISTORY OUT`.

OUT/0, OUT/1, ... are copies of HISTORY in which a compaction died just before its n-th rename or deletion; the last one
went through. One process imports everything and forks a child for each, before any library has started a thread.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from killed_changes import die_before

from storage.history.segments import compact


def main(history: Path, out: Path) -> None:
    for number in range(1, 200):
        folder = out / str(number)
        shutil.copytree(history, folder)
        child = os.fork()
        if not child:
            die_before(number, "replace", "unlink")
            compact(folder, 2)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
    raise SystemExit("a compaction that never ends")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
