"""Engines whose output differs from our own loop's, by the comparisons in the same store as a release.

This is the promotion gate's rule (storage/engine_gate.sql) for a step, which has no database: the newest comparison of
an engine counts, and one that could not compare is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from components.publish.lineage import RECORD
from components.rows import ALL, UNTRAINED, EngineComparison, read_rows, table_of


def engines_with_mismatch(folders: Iterable[Path], draft_key: str) -> list[str]:
    """Engines, with their versions, whose newest comparison is a mismatch. folders: of Measurements artifacts."""
    newest: dict[tuple[str, str, int, int], tuple[float, list[EngineComparison]]] = {}
    for folder in folders:
        finished = _finished_at(folder)
        for row in read_rows(folder, EngineComparison):
            compared = row.verdict != "not_compared" or (row.method in UNTRAINED and row.num_compared > 0)
            if row.draft_key != draft_key or row.workload != ALL or not compared:
                continue
            key = (row.engine, row.method, row.depth_k, row.concurrency)
            previous = newest.get(key)
            if previous is None or finished > previous[0]:
                newest[key] = (finished, [row])
            elif finished == previous[0]:
                previous[1].append(row)
    mismatches = (row for _, rows in newest.values() for row in rows if row.verdict == "mismatch")
    return sorted({f"{row.engine} {row.engine_version}".strip() for row in mismatches})


def sibling_comparisons(artifact: Path) -> list[Path]:
    """Folders of the artifacts in the same store that hold comparisons with engines."""
    table = f"{table_of(EngineComparison)}.jsonl"
    return sorted(file.parent for file in artifact.absolute().parent.glob(f"*/{table}"))


def _finished_at(folder: Path) -> float:
    file = folder / RECORD
    return float(json.loads(file.read_text(encoding="utf-8")).get("finished_at", 0.0)) if file.is_file() else 0.0
