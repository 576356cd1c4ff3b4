"""How long a person waits: check, plan, a second run with everything reused, with and without Prefect.

Needs a finished `quickstart` run. Each command is run several times as a whole process; the median is the number.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.finished import missing_for
from benchmarks.record import ROOT, write_record

COMMANDS: dict[str, tuple[list[str], int]] = {
    "check": (["check"], 7),
    "plan quickstart": (["plan", "quickstart"], 7),
    "run quickstart --direct, all reused": (["run", "quickstart", "--direct"], 5),
    "run quickstart, all reused": (["run", "quickstart"], 3),
}


def seconds_of(arguments: list[str]) -> float:
    """Wall seconds of one `draftsmith` command, which must succeed."""
    start = time.perf_counter()
    program = Path(sys.executable).with_name("draftsmith")
    done = subprocess.run([str(program), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"draftsmith {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start


def main() -> None:
    """Time every command and write the record."""
    if why := missing_for():
        raise SystemExit(f"commands: {why}")
    rows = {}
    for label, (arguments, repetitions) in COMMANDS.items():
        seconds_of(arguments)  # warm the disk cache
        times = [seconds_of(arguments) for _ in range(repetitions)]
        rows[label] = {
            "median_s": statistics.median(times),
            "min_s": min(times),
            "max_s": max(times),
            "runs": repetitions,
        }
        print(f"{label:40} {statistics.median(times):7.2f} s  (min {min(times):.2f}, max {max(times):.2f})")
    file = write_record("commands", {"commands": rows, "load_average": os.getloadavg()[0]})
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
