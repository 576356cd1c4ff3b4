"""Imported rows grouped into cases: acceptance and cost of each drafter, batch size and context length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean

import numpy as np

from components.contract import UserError
from components.rows import ALL, CostCell
from components.speedup.imported.acceptance import Acceptance, acceptance_from
from components.speedup.imported.rows import ImportedRow, SourcedRow
from components.speedup.prediction.costs import CostTable, Setting, StepTimes, cost_table, exact_table


@dataclass
class MeasurementCase:
    """One drafter in one setting at one batch size and context length (kv_len None: over all lengths)."""

    label: str
    method: str
    tree_budget: int | None
    draft_vocab: int | None
    trained_depth: int | None
    batch_size: int
    kv_len: int | None
    rows: list[ImportedRow]
    table: CostTable | None  # from step times; None where only speedups are known
    measured: dict[tuple[str, int], float]  # (workload, depth) -> end-to-end speedup

    @property
    def workloads(self) -> set[str]:
        """Workloads with acceptance data."""
        return {row.workload or ALL for row in self.rows if row.has_acceptance}

    def acceptance_of(self, workload: str) -> Acceptance:
        """The acceptance on a workload."""
        return acceptance_from(row for row in self.rows if workload in (ALL, row.workload or ALL))


def cases_of(rows: Sequence[SourcedRow]) -> list[MeasurementCase]:
    """Every case, chains and small batches first.

    Raises:
        UserError: a drafter without acceptance or without cost.
    """
    checked_rows = [item.row for item in rows]
    settings = sorted({setting_of(r) for r in checked_rows if r.has_acceptance}, key=str)
    if not settings:
        kinds = "accepted, tokens + rounds, num_drafts + accepted_per_pos, p, or al"
        raise UserError(f"no row tells of acceptance: give {kinds}")
    cases = []
    for setting in settings:
        drafter_rows = [r for r in checked_rows if setting_of(r) == setting or is_shared(r)]
        cost_rows = [r for r in drafter_rows if r.t_verify is not None or r.tpot is not None or r.speedup is not None]
        if not cost_rows:
            raise UserError(f"{label_of(setting)}: no cost; give t_target, t_verify and t_draft, or tpot, or speedup")
        for batch_size in sorted({r.batch_size for r in cost_rows}):
            batch_rows = [r for r in drafter_rows if r.batch_size == batch_size]
            lengths = sorted({r.kv_len for r in batch_rows if r.t_verify is not None and r.kv_len is not None})
            for kv_len in [None, *(lengths if len(lengths) > 1 else [])]:
                cases.append(_make_case(setting, drafter_rows, batch_rows, batch_size, kv_len))
    return cases


DraftSetting = tuple[str, int | None, int | None]  # drafter, draft_vocab, tree_budget


def setting_of(row: ImportedRow) -> DraftSetting:
    """The drafter of a row, with its setting."""
    return row.drafter or row.method or "drafter", row.draft_vocab, row.tree_budget


def is_shared(row: ImportedRow) -> bool:
    """Whether a row belongs to every drafter (a plain step, a shared cost): it names no drafter and no setting."""
    named = (row.drafter, row.method, row.draft_vocab, row.tree_budget)
    return all(value is None for value in named) and not row.has_acceptance


def label_of(setting: DraftSetting) -> str:
    """The name of a drafter in its setting."""
    name, vocab, tree = setting
    return name + (f", vocabulary {vocab}" if vocab else "") + (f", tree of {tree}" if tree else "")


def _make_case(
    setting: DraftSetting,
    drafter_rows: list[ImportedRow],
    batch_rows: list[ImportedRow],
    batch_size: int,
    kv_len: int | None,
) -> MeasurementCase:
    """drafter_rows: all rows of the drafter; batch_rows: those at this batch size, preferred for acceptance."""
    acceptance_rows = [r for r in batch_rows if r.has_acceptance] or [r for r in drafter_rows if r.has_acceptance]
    at_length = [r for r in acceptance_rows if kv_len is not None and r.kv_len == kv_len] or acceptance_rows
    label = label_of(setting)
    cells = _cost_cells(batch_rows, label, setting[2], kv_len)
    timed = any(cell.phase == "verify" for cell in cells)
    cost_setting = Setting(label, batch_size, setting[2], kv_len)
    return MeasurementCase(
        label=label,
        method=next((r.method for r in drafter_rows if r.method), setting[0]),
        tree_budget=setting[2],
        draft_vocab=setting[1],
        trained_depth=min((r.trained_depth for r in drafter_rows if r.trained_depth), default=None),
        batch_size=batch_size,
        kv_len=kv_len,
        rows=at_length,
        table=cost_table(cells, cost_setting) if timed else None,
        measured=_measured_speedups(batch_rows),
    )


def _cost_cells(rows: Sequence[ImportedRow], label: str, tree_budget: int | None, kv_len: int | None) -> list[CostCell]:
    """Step times as cost cells. A time without a context length holds at every length."""
    cells = []
    for row in rows:
        phases = {"target_step": row.t_target, "verify": row.t_verify, "draft": row.t_draft, "host": row.t_host}
        for phase, milliseconds in phases.items():
            if milliseconds is None:
                continue
            depth = 0 if phase == "target_step" else (row.k or 0)
            cells.append(
                CostCell(
                    target_key="",
                    draft_key=label,
                    method="",
                    phase=phase,
                    depth_k=depth,
                    batch_size=row.batch_size,
                    num_rows=(tree_budget or depth) + 1,
                    kv_len=row.kv_len or kv_len or 0,
                    block=row.block or 0,
                    reps_in_block=1,
                    median_ns=milliseconds * 1e6,
                    mad_ns=0.0,
                    dtype="",
                    kernel="",
                    num_threads=0,
                    tree_budget=tree_budget if depth else None,
                )
            )
    return cells


def _measured_speedups(rows: Sequence[ImportedRow]) -> dict[tuple[str, int], float]:
    """(workload, depth) -> end-to-end speedup: as given, or time per token of plain decoding over that of the depth.

    Repetitions and prompts weigh the same: mean time over mean time, and the harmonic mean of speedups.
    """
    speedups: dict[tuple[str, int], list[float]] = {}
    times: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        key = (row.workload or ALL, row.k or 0)
        if row.speedup is not None and row.k:
            speedups.setdefault(key, []).append(row.speedup)
        elif row.tpot is not None:
            times.setdefault(key, []).append(row.tpot)
    measured = {key: harmonic_mean(values) for key, values in speedups.items()}
    for (workload, depth), depth_times in times.items():
        plain = times.get((workload, 0)) or times.get((ALL, 0))
        if depth and plain is None:
            raise UserError("tpot: plain decoding's is missing; add a row with k = 0 and its tpot")
        if depth and plain is not None:
            measured.setdefault((workload, depth), fmean(plain) / fmean(depth_times))
    return measured


def borrowed_table(case: MeasurementCase, workload: str) -> CostTable:
    """A table of costs without step times: AL / S at each depth, averaged over the other workloads, else its own."""
    factors: dict[int, dict[str, float]] = {}
    for (name, depth), speedup in case.measured.items():
        acceptance = case.acceptance_of(name)
        if depth in acceptance.depths:
            tokens, rounds = acceptance.at([depth])
            factors.setdefault(depth, {})[name] = float(tokens.sum() / rounds.sum()) / speedup
    if not factors:
        raise UserError(f"{case.label}: speedups and acceptance share no depth")
    depths = sorted(factors)
    others = {k: [f for name, f in factors[k].items() if name != workload] or list(factors[k].values()) for k in depths}
    cost = np.array([1.0, *(fmean(others[k]) for k in depths)])
    zeros = np.zeros_like(cost)
    return exact_table([0, *depths], StepTimes(np.array(1.0), cost, zeros, zeros))
