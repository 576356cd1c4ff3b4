"""The table that compares an engine serving the drafter with our own loop and with the prediction."""

from __future__ import annotations

from collections.abc import Iterable

from components.report.tables import Table, format_ratio
from components.rows import EngineComparison


def engine_table(rows: Iterable[EngineComparison]) -> Table:
    """One line for each engine, drafter, depth and workload; acceptance length is tokens a round, bonus included."""
    cells = [
        [
            f"{row.engine} {row.engine_version}".strip()
            + (f", {row.concurrency} at once" if row.concurrency > 1 else ""),
            row.method,
            str(row.depth_k),
            row.workload,
            _same_texts(row),
            *(_format_length(value) for value in (row.al_pred, row.al_ours, row.al_engine)),
            *(format_ratio(value) for value in (row.speedup_pred, row.speedup_ours, row.speedup_engine)),
            row.verdict.replace("_", " "),
        ]
        for row in rows
    ]
    header = ["engine", "drafter", "depth", "workload", "same text", "AL predicted", "AL ours", "AL engine"]
    header += ["speedup predicted", "speedup ours", "speedup engine", "verdict"]
    return Table(header, cells)


def _same_texts(row: EngineComparison) -> str:
    if not row.num_compared:
        return "not compared"
    share = f"{row.num_identical} of {row.num_compared}"
    return f"{share}, {row.num_ties} at a tie" if row.num_ties else share


def _format_length(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
