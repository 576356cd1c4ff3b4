"""Outside rows put together: what is known about acceptance and about cost of each drafter, batch size and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean

import numpy as np

from components.contract import UserError
from components.rows import CostCell
from components.speedup.costs import CostTable, Setting, StepTimes, cost_table, known_table
from components.speedup.outside_acceptance import Acceptance, acceptance_from
from components.speedup.outside_rows import OutsideRow, Placed
from components.speedup.policy import ALL


@dataclass
class Case:
    """One drafter in one setting at one batch size, over one context length or (kv_len None) all of them."""

    label: str
    method: str
    tree_budget: int | None
    draft_vocab: int | None
    trained_depth: int | None
    batch_size: int
    kv_len: int | None
    rows: list[OutsideRow]
    table: CostTable | None  # from timed phases; None where only speedups are known
    measured: dict[tuple[str, int], float]  # (workload, depth) -> end-to-end speedup

    @property
    def workloads(self) -> set[str]:
        """Workloads with acceptance of their own."""
        return {row.workload or ALL for row in self.rows if row.tells_acceptance}

    def acceptance_of(self, workload: str) -> Acceptance:
        """What is known about acceptance on a workload."""
        return acceptance_from(row for row in self.rows if workload in (ALL, row.workload or ALL))


def cases_of(placed: Sequence[Placed]) -> list[Case]:
    """Every case, chains and small batches first.

    Raises:
        UserError: a drafter without acceptance or without cost.
    """
    rows = [p.row for p in placed]
    settings = sorted({setting_of(r) for r in rows if r.tells_acceptance}, key=str)
    if not settings:
        kinds = "accepted, tokens + rounds, num_drafts + accepted_per_pos, p, or al"
        raise UserError(f"no row tells of acceptance: give {kinds}")
    cases = []
    for setting in settings:
        mine = [r for r in rows if setting_of(r) == setting or is_shared(r)]
        costed = [r for r in mine if r.t_verify is not None or r.tpot is not None or r.speedup is not None]
        if not costed:
            raise UserError(f"{label_of(setting)}: no cost; give t_target, t_verify and t_draft, or tpot, or speedup")
        for batch_size in sorted({r.batch_size for r in costed}):
            here = [r for r in mine if r.batch_size == batch_size]
            lengths = sorted({r.kv_len for r in here if r.t_verify is not None and r.kv_len is not None})
            for kv_len in [None, *(lengths if len(lengths) > 1 else [])]:
                cases.append(_case(setting, mine, here, batch_size, kv_len))
    return cases


DraftSetting = tuple[str, int | None, int | None]  # drafter, draft_vocab, tree_budget


def setting_of(row: OutsideRow) -> DraftSetting:
    """The drafter that a row is of, in which setting."""
    return row.drafter or row.method or "drafter", row.draft_vocab, row.tree_budget


def is_shared(row: OutsideRow) -> bool:
    """Whether a row (a plain step, a cost that all share) belongs to every drafter: it names none, in no setting."""
    named = (row.drafter, row.method, row.draft_vocab, row.tree_budget)
    return all(value is None for value in named) and not row.tells_acceptance


def label_of(setting: DraftSetting) -> str:
    """What a drafter in its setting is called."""
    name, vocab, tree = setting
    return name + (f", vocabulary {vocab}" if vocab else "") + (f", tree of {tree}" if tree else "")


def _case(
    setting: DraftSetting,
    mine: list[OutsideRow],
    here: list[OutsideRow],
    batch_size: int,
    kv_len: int | None,
) -> Case:
    """mine: every row of the drafter; here: those at this batch size. Acceptance is that of the batch size if known."""
    known = [r for r in here if r.tells_acceptance] or [r for r in mine if r.tells_acceptance]
    at_length = [r for r in known if kv_len is not None and r.kv_len == kv_len] or known
    label = label_of(setting)
    cells = _cells(here, label, setting[2], kv_len)
    timed = any(cell.phase == "verify" for cell in cells)
    wanted = Setting(label, batch_size, setting[2], kv_len)
    return Case(
        label=label,
        method=next((r.method for r in mine if r.method), setting[0]),
        tree_budget=setting[2],
        draft_vocab=setting[1],
        trained_depth=min((r.trained_depth for r in mine if r.trained_depth), default=None),
        batch_size=batch_size,
        kv_len=kv_len,
        rows=at_length,
        table=cost_table(cells, wanted) if timed else None,
        measured=_measured(here),
    )


def _cells(rows: Sequence[OutsideRow], label: str, tree_budget: int | None, kv_len: int | None) -> list[CostCell]:
    """Timed phases as the cost cells of components/rows.py. A time that names no context length holds at every one."""
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


def _measured(rows: Sequence[OutsideRow]) -> dict[tuple[str, int], float]:
    """End-to-end speedups, (workload, depth) -> speedup: as told, or plain time per token over that of the depth.

    Repetitions and prompts count alike in plain time: mean time over mean time, and the harmonic mean of speedups.
    """
    told: dict[tuple[str, int], list[float]] = {}
    times: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        key = (row.workload or ALL, row.k or 0)
        if row.speedup is not None and row.k:
            told.setdefault(key, []).append(row.speedup)
        elif row.tpot is not None:
            times.setdefault(key, []).append(row.tpot)
    found = {key: harmonic_mean(values) for key, values in told.items()}
    for (workload, depth), spent in times.items():
        plain = times.get((workload, 0)) or times.get((ALL, 0))
        if depth and plain is None:
            raise UserError("tpot: plain decoding's is missing; add a row with k = 0 and its tpot")
        if depth and plain is not None:
            found.setdefault((workload, depth), fmean(plain) / fmean(spent))
    return found


def borrowed_table(case: Case, workload: str) -> CostTable:
    """Cost of a round over a plain step at each depth: the mean of AL / S over the other workloads, else its own."""
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
    nothing = np.zeros_like(cost)
    return known_table([0, *depths], StepTimes(np.array(1.0), cost, nothing, nothing))
