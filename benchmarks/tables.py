"""What all tables of the documentation are made with: the newest record of a benchmark, and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.record import RESULTS

MACHINE = "2cfee56fde51e37c"
"""Where the numbers were taken: two cores, no GPU."""
METHOD_NAMES = {"dflash": "DFlash", "dspark": "DSpark"}
Row = tuple[str, ...]


def record(name: str, *, timed: bool = True) -> dict[str, Any]:
    """The newest record of a benchmark, on that machine where it is `timed`."""
    return next(one for one in reversed(records(name)) if not timed or one["machine"]["machine_id"] == MACHINE)


def records(name: str) -> list[dict[str, Any]]:
    """All records of a benchmark, the oldest first."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob(f"{name}-20*.json"))]


def markdown(head: Row, rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
