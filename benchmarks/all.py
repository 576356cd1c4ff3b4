"""`make bench`: every benchmark that what is in the store allows, one process each; the others say what they lack.

Ends with exit code 1 when a benchmark failed; one that was skipped is no failure.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.finished import missing_for
from benchmarks.record import ROOT

BENCHMARKS: dict[str, tuple[str, ...] | None] = {
    "answering_speed": None,
    "bootstrap": None,
    "commands": (),
    "datasets_at_scale": None,
    "feature_precision": None,
    "feature_store": None,
    "history": None,
    "identity": ("target", "draft"),
    "packing": None,
    "quantised_drafts": ("target", "draft"),
    "repeatability": ("target", "draft", "prompts"),
    "trees": ("target", "draft"),
}
"""Module of each benchmark, and the steps of `quickstart` that it needs ((): all of them, None: nothing)."""


def main() -> int:
    """Run what can run; returns the exit code."""
    failed, skipped = [], []
    for name, steps in BENCHMARKS.items():
        why = missing_for(*steps) if steps is not None else ""
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
