"""`make bench`: every benchmark that what is in the store allows, one process each; the others say what they lack.

Ends with exit code 1 when a benchmark failed; one that was skipped is no failure.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.finished import missing_for
from benchmarks.record import ROOT

BENCHMARKS: dict[str, tuple[str, ...]] = {
    "commands": (),
    "identity": ("target", "draft"),
}
"""Module of each benchmark, and the steps of `quickstart` that it needs (none named: all)."""


def main() -> int:
    """Run what can run; returns the exit code."""
    failed, skipped = [], []
    for name, steps in BENCHMARKS.items():
        why = missing_for(*steps)
        if why:
            skipped.append(f"{name}: skipped, {why}")
            continue
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode != 0:
            failed.append(f"{name}: failed, its own message is above")
    for line in [*skipped, *failed]:
        print(line)
    print(f"{len(BENCHMARKS) - len(failed) - len(skipped)} measured, {len(skipped)} skipped, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
