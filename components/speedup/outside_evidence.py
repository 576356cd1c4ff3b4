"""Outside rows put together: what is known about acceptance and about cost of each drafter, batch size and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from components.contract import UserError
from components.rows import CostCell
from components.speedup.bootstrap import Floats
from components.speedup.costs import CostTable, Setting, StepTimes, cost_table, known_table
from components.speedup.outside_rows import OutsideRow, Placed
from components.speedup.policy import ALL
from components.speedup.replay import count


@dataclass
class Acceptance:
    """Tokens kept and rounds of every unit (a prompt, or all prompts at once) at every depth.

    num_prompts: 0 where a unit is not a prompt. is_prefix: a depth was read off the first positions of a deeper run.
    """

    cells: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # unit, depth -> tokens, rounds
    num_prompts: int = 0
    is_counted: bool = True  # False where only lengths were told, so that rounds are not known
    is_prefix: bool = False

    def add(self, unit: str, depth: int, tokens: float, rounds: float) -> None:
        """Count; repetitions add up."""
        before = self.cells.get((unit, depth), (0.0, 0.0))
        self.cells[unit, depth] = (before[0] + tokens, before[1] + rounds)

    @property
    def depths(self) -> list[int]:
        """Drafting depths at which something is known."""
        return sorted({depth for _, depth in self.cells} - {0})

    def num_rounds(self, depth: int) -> int:
        """Rounds at a depth (of plain decoding: the shallowest); very many where only lengths were told."""
        at = depth or self.depths[0]
        return int(sum(rounds for (_, k), (_, rounds) in self.cells.items() if k == at)) if self.is_counted else 10**9

    @property
    def num_tokens(self) -> float:
        """Tokens kept at the shallowest depth."""
        return sum(tokens for (_, k), (tokens, _) in self.cells.items() if k == self.depths[0])

    def at(self, depths: Sequence[int]) -> tuple[Floats, Floats]:
        """tokens, rounds: [units, depths] of the units known at every depth; plain decoding keeps a token a round.

        Without prompts the units are added up: what is no prompt must not be resampled as if it were one.

        Raises:
            UserError: no prompt was measured at every depth.
        """
        drafted = [k for k in depths if k]
        units = sorted({unit for unit, _ in self.cells})
        whole = [unit for unit in units if all((unit, k) in self.cells for k in drafted)]
        if not whole:
            raise UserError(f"acceptance: no prompt has rows at every one of the depths {drafted}")
        tokens = np.array([[self.cells[unit, k or drafted[0]][0] for k in depths] for unit in whole])
        rounds = np.array([[self.cells[unit, k or drafted[0]][0 if k == 0 else 1] for k in depths] for unit in whole])
        if self.num_prompts:
            return tokens, rounds
        return tokens.sum(axis=0, keepdims=True), rounds.sum(axis=0, keepdims=True)


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
        return {row.workload or ALL for row in self.rows if _tells_acceptance(row)}

    def acceptance_of(self, workload: str) -> Acceptance:
        """What is known about acceptance on a workload."""
        mine = [row for row in self.rows if _tells_acceptance(row) and workload in (ALL, row.workload or ALL)]
        found = Acceptance(is_counted=all(row.al is None for row in mine))
        by_prompt = all(row.prompt is not None for row in mine)
        deepest = _deepest([row for row in mine if row.accepted is not None])
        direct = {row.k for row in mine}
        for row in mine:
            unit = f"{row.workload}\n{row.prompt if by_prompt else ''}"
            _add(found, unit, row, deepest, direct)
        found.num_prompts = len({unit for unit, _ in found.cells}) if by_prompt else 0
        return found


def _deepest(maps: Sequence[OutsideRow]) -> int:
    """The depth that every map reaches, so that none is replayed beyond what was drafted for it.

    Where none says how deep that was, the longest run of kept drafts is all there is.
    """
    stated = [row.k_max for row in maps if row.k_max is not None]
    return min(stated, default=0) or max((max(row.accepted or [0]) for row in maps), default=0)


def _add(found: Acceptance, unit: str, row: OutsideRow, deepest: int, direct: set[int | None]) -> None:
    """Enter one row."""
    depth = row.k or 0
    if row.accepted is not None:
        for k in range(1, deepest + 1):
            counted = count(row.accepted, k)
            found.add(unit, k, counted.tokens, counted.rounds)
    elif row.tokens is not None and row.rounds is not None:
        found.add(unit, depth, row.tokens, row.rounds)
    elif row.num_drafts is not None and row.accepted_per_pos is not None:
        for k in range(1, depth + 1):
            if k == depth or k not in direct:
                found.add(unit, k, row.num_drafts + sum(row.accepted_per_pos[:k]), row.num_drafts)
                found.is_prefix |= k < depth
    elif row.al is not None:
        found.add(unit, depth, row.al, 1.0)


def _tells_acceptance(row: OutsideRow) -> bool:
    return any(value is not None for value in (row.accepted, row.tokens, row.num_drafts, row.al)) and row.k != 0


def cases_of(placed: Sequence[Placed]) -> list[Case]:
    """Every case, chains and small batches first.

    Raises:
        UserError: a drafter without acceptance or without cost.
    """
    rows = [p.row for p in placed]
    settings = sorted({_setting(r) for r in rows if _tells_acceptance(r)}, key=str)
    if not settings:
        raise UserError(
            "no row tells of acceptance: give accepted, tokens + rounds, num_drafts + accepted_per_pos, or al"
        )
    cases = []
    for setting in settings:
        mine = [r for r in rows if _setting(r) == setting or _is_shared(r)]
        costed = [r for r in mine if r.t_verify is not None or r.tpot is not None or r.speedup is not None]
        if not costed:
            raise UserError(f"{_label(setting)}: no cost; give t_target, t_verify and t_draft, or tpot, or speedup")
        for batch_size in sorted({r.batch_size for r in costed}):
            here = [r for r in mine if r.batch_size == batch_size]
            lengths = sorted({r.kv_len for r in here if r.t_verify is not None and r.kv_len is not None})
            for kv_len in [None, *(lengths if len(lengths) > 1 else [])]:
                cases.append(_case(setting, mine, here, batch_size, kv_len))
    return cases


Setting3 = tuple[str, int | None, int | None]  # drafter, draft_vocab, tree_budget


def _setting(row: OutsideRow) -> Setting3:
    return row.drafter or row.method or "drafter", row.draft_vocab, row.tree_budget


def _is_shared(row: OutsideRow) -> bool:
    """Whether a row (a plain step, a cost that all share) belongs to every drafter: it names none, in no setting."""
    named = (row.drafter, row.method, row.draft_vocab, row.tree_budget)
    return all(value is None for value in named) and not _tells_acceptance(row)


def _label(setting: Setting3) -> str:
    name, vocab, tree = setting
    return name + (f", vocabulary {vocab}" if vocab else "") + (f", tree of {tree}" if tree else "")


def _case(
    setting: Setting3,
    mine: list[OutsideRow],
    here: list[OutsideRow],
    batch_size: int,
    kv_len: int | None,
) -> Case:
    """mine: every row of the drafter; here: those at this batch size. Acceptance is that of the batch size if known."""
    known = [r for r in here if _tells_acceptance(r)] or [r for r in mine if _tells_acceptance(r)]
    at_length = [r for r in known if kv_len is not None and r.kv_len == kv_len] or known
    label = _label(setting)
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
    """End-to-end speedups: as told, or plain time per token over that of the depth. Repetitions are averaged."""
    told: dict[tuple[str, int], list[float]] = {}
    plain: dict[str, list[float]] = {}
    for row in rows:
        if row.k == 0 and row.tpot is not None:
            plain.setdefault(row.workload or ALL, []).append(row.tpot)
    for row in rows:
        key = (row.workload or ALL, row.k or 0)
        base = plain.get(key[0]) or plain.get(ALL)
        if row.speedup is not None and row.k:
            told.setdefault(key, []).append(row.speedup)
        elif row.tpot is not None and row.k:
            if base is None:
                raise UserError("tpot: plain decoding's is missing; add a row with k = 0 and its tpot")
            told.setdefault(key, []).append(fmean(base) / row.tpot)
    return {key: fmean(values) for key, values in told.items()}


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
