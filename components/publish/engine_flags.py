"""Does an engine that served this drafter do otherwise than our own loop? Read from the comparisons beside a release.

The rule of the promotion gate (storage/engine_gate.sql) for a step, which asks no database: of several comparisons of
one engine the newest counts; one that could not compare says nothing and clears nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from components.publish.lineage import RECORD
from components.rows import UNTRAINED, EngineComparison, read_rows, table_of

ALL = "all"


def standing_mismatches(folders: Iterable[Path], draft_key: str) -> list[str]:
    """Engines whose newest comparison is a mismatch, with their version. folders: of Measurements artifacts."""
    newest: dict[tuple[str, str, int, int], tuple[float, list[EngineComparison]]] = {}
    for folder in folders:
        finished = _finished_at(folder)
        for row in read_rows(folder, EngineComparison):
            said = row.verdict != "not_compared" or (row.method in UNTRAINED and row.num_compared > 0)
            if row.draft_key != draft_key or row.workload != ALL or not said:
                continue
            key = (row.engine, row.method, row.depth_k, row.concurrency)
            known = newest.get(key)
            if known is None or finished > known[0]:
                newest[key] = (finished, [row])
            elif finished == known[0]:
                known[1].append(row)
    found = (row for _, rows in newest.values() for row in rows if row.verdict == "mismatch")
    return sorted({f"{row.engine} {row.engine_version}".strip() for row in found})


def comparisons_beside(artifact: Path) -> list[Path]:
    """The artifacts in the same store that hold comparisons with engines."""
    table = f"{table_of(EngineComparison)}.jsonl"
    return sorted(file.parent for file in artifact.absolute().parent.glob(f"*/{table}"))


def _finished_at(folder: Path) -> float:
    file = folder / RECORD
    return float(json.loads(file.read_text(encoding="utf-8")).get("finished_at", 0.0)) if file.is_file() else 0.0
