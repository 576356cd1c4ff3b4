"""Every test marked gpu, several at once, and a record of how each went, written whenever one begins or ends.

So a run that is ended at its limit says what passed, what failed, what it was ended in and what did not run.
DRAFTSMITH_TEST_DEVICE=cpu tries the tests that can run without a GPU.

    python -m benchmarks.gpu_tests [arguments of pytest]
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.record import RESULTS, write_record
from components.machine import num_usable_cores

MOST_AT_ONCE = 6
"""Processes for tests at most: each holds a CUDA context of its own, and whole pipelines start more."""
FAILURE = 2000
"""Characters of a failure that are kept."""


@dataclass
class Result:
    """How a test went so far."""

    state: Literal["passed", "failed", "skipped", "not ended", "not run"] = "not run"
    seconds: float = 0.0
    failure: str = ""


class Journal:
    """A plugin of pytest that writes the record."""

    def __init__(self, workers: int, device: str, folder: Path) -> None:
        self.workers, self.device, self.folder = workers, device, folder
        self.results: dict[str, Result] = {}

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """A worker knows all tests, which are the same for each, for one too that takes a dead one's place."""
        for name in ids:
            self.results.setdefault(name, Result())
        self.write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.results[nodeid].state = "not ended"
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's fixtures, its body or its end are done."""
        result = self.results[report.nodeid]
        result.seconds = round(result.seconds + report.duration, 1)
        if report.outcome != "passed":
            result.state = report.outcome
            result.failure += report.longreprtext[-FAILURE:]
        elif report.when == "call":
            result.state = "passed"
        if report.when in ("call", "???") or report.outcome != "passed":  # "???" is of a test whose process died
            self.write()

    def write(self) -> None:
        """Write the record."""
        counts = Counter(result.state for result in self.results.values())
        tests = {name: asdict(result) for name, result in self.results.items()}
        numbers = {"workers": self.workers, "counts": counts, "tests": tests}
        write_record("gpu-tests", numbers, device=self.device, folder=self.folder)


def main(folder: Path = RESULTS) -> int:
    """Run the tests; returns pytest's exit code."""
    workers = min(MOST_AT_ONCE, num_usable_cores())
    journal = Journal(workers, os.environ.get("DRAFTSMITH_TEST_DEVICE", "cuda"), folder)
    return pytest.main(["-m", "gpu", "-n", str(workers), "-rs", *sys.argv[1:]], plugins=[journal])


if __name__ == "__main__":
    sys.exit(main())
