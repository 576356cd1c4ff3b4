"""Imported rows grouped into cases: acceptance and cost of each drafter, batch size and context length.

Acceptance is tokens kept and rounds at every depth, of every prompt or of all prompts at once. Where a row gives only a
length (al, or p), its number of tokens is not known. Several such lengths count as if each had the same number of
tokens: AL = n / sum(1 / al), their harmonic mean. For rows of single prompts this is a macro mean, which equals the
pooled AL only if all answers are equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, harmonic_mean

import numpy as np

from components.contract import UserError
from components.rows import ALL, CostCell
from components.speedup.bootstrap import Floats
from components.speedup.imported.rows import ImportedRow, SourcedRow
from components.speedup.prediction.costs import CostTable, Setting, StepTimes, cost_table, exact_table
from components.speedup.prediction.predict import acceptance_lengths
from components.speedup.prediction.replay import count

Unit = tuple[str, str]  # (workload, prompt), "" where not named


@dataclass
class Acceptance:
    """Tokens kept and rounds of every unit (a prompt, or all prompts at once) at every depth.

    num_prompts: 0 where a unit is not a prompt. is_counted: False where some rows give only a length, so that rounds
    are not known. is_prefix: whether a depth comes from the first positions of a deeper run. lengths: depth -> given
    lengths.
    """

    cells: dict[tuple[Unit, int], tuple[float, float]] = field(default_factory=dict)  # -> tokens, rounds
    num_prompts: int = 0
    is_counted: bool = True
    is_prefix: bool = False
    lengths: dict[int, list[float]] = field(default_factory=dict)

    def add(self, unit: Unit, depth: int, tokens: float, rounds: float) -> None:
        """Add counts; repetitions add up."""
        before = self.cells.get((unit, depth), (0.0, 0.0))
        self.cells[unit, depth] = (before[0] + tokens, before[1] + rounds)

    def add_length(self, unit: Unit, depth: int, al: float) -> None:
        """Add a length without counts: one token, and its part of a round."""
        self.add(unit, depth, 1.0, 1.0 / al)
        self.lengths.setdefault(depth, []).append(al)
        self.is_counted = False

    @property
    def depths(self) -> list[int]:
        """Drafting depths with data."""
        return sorted({depth for _, depth in self.cells} - {0})

    @property
    def units(self) -> set[Unit]:
        """The prompts, or the units that stand for all of them."""
        return {unit for unit, _ in self.cells}

    def num_rounds(self, depth: int) -> int:
        """Rounds at a depth (0: at the shallowest); 10**9 where only lengths are known."""
        column_depth = depth or self.depths[0]
        return (
            int(sum(rounds for (_, k), (_, rounds) in self.cells.items() if k == column_depth))
            if self.is_counted
            else 10**9
        )

    @property
    def num_tokens(self) -> float:
        """Tokens kept at the shallowest depth."""
        return sum(tokens for (_, k), (tokens, _) in self.cells.items() if k == self.depths[0])

    def whole_units(self, depths: Sequence[int]) -> list[Unit]:
        """Units with data at every one of the depths."""
        return [unit for unit in sorted(self.units) if all((unit, k) in self.cells for k in depths if k)]

    def at(self, depths: Sequence[int]) -> tuple[Floats, Floats]:
        """tokens, rounds: [units, depths] of the units with data at every depth; plain decoding keeps a token a round.

        Units that are no prompts are summed into one, since they must not be resampled like prompts.

        Raises:
            UserError: no prompt was measured at every depth.
        """
        drafted = [k for k in depths if k]
        whole = self.whole_units(depths)
        if not whole:
            raise UserError(f"acceptance: no prompt has rows at every one of the depths {drafted}")
        tokens = np.array([[self.cells[unit, k or drafted[0]][0] for k in depths] for unit in whole])
        rounds = np.array([[self.cells[unit, k or drafted[0]][0 if k == 0 else 1] for k in depths] for unit in whole])
        if self.num_prompts:
            return tokens, rounds
        return tokens.sum(axis=0, keepdims=True), rounds.sum(axis=0, keepdims=True)


def acceptance_from(rows: Iterable[ImportedRow]) -> Acceptance:
    """The acceptance in rows of one drafter in one setting; rows without acceptance are skipped."""
    acceptance_rows = [row for row in rows if row.has_acceptance]
    acceptance = Acceptance()
    by_prompt = all(row.prompt is not None for row in acceptance_rows)
    deepest = _common_depth([row for row in acceptance_rows if row.accepted is not None])
    direct = {row.k for row in acceptance_rows if row.accepted is None}

    def unit(row: ImportedRow) -> Unit:
        return row.workload or "", (row.prompt or "") if by_prompt else ""

    for row in acceptance_rows:
        _add_row(acceptance, unit(row), row, deepest, direct)
    for chain in position_chains(acceptance_rows):
        lengths = acceptance_lengths([row.p for row in chain if row.p is not None])
        for row, al in zip(chain, lengths[1:], strict=True):
            acceptance.add_length(unit(row), row.k or 0, al)
    acceptance.num_prompts = len(acceptance.units) if by_prompt else 0
    return acceptance


def position_chains(rows: Iterable[ImportedRow]) -> list[list[ImportedRow]]:
    """Rows with p, grouped into chains of positions in ascending order; of repeated positions the first one counts."""
    chains: dict[tuple[object, ...], dict[int, ImportedRow]] = {}
    for row in rows:
        if row.p is not None:
            belongs = (row.workload, row.prompt, row.batch_size, row.kv_len, row.block, row.rep)
            chains.setdefault(belongs, {}).setdefault(row.k or 0, row)
    return [[chain[k] for k in sorted(chain)] for chain in chains.values()]


def _common_depth(maps: Sequence[ImportedRow]) -> int:
    """The depth that every map reaches, so that none is replayed deeper than it was drafted.

    Where no map states its depth, the longest run of kept drafts stands in.
    """
    stated = [depth for depth in (row.k_max or row.k for row in maps) if depth is not None]
    return min(stated, default=0) or max((max(row.accepted or [0]) for row in maps), default=0)


def _add_row(acceptance: Acceptance, unit: Unit, row: ImportedRow, deepest: int, direct: set[int | None]) -> None:
    """Add a row of any kind but p."""
    depth = row.k or 0
    if row.accepted is not None:
        for k in range(1, deepest + 1):
            counts = count(row.accepted, k)
            acceptance.add(unit, k, counts.tokens, counts.rounds)
    elif row.num_drafts is not None and row.accepted_per_pos is not None:
        for k in range(1, depth + 1):
            if k == depth or k not in direct:
                acceptance.add(unit, k, row.num_drafts + sum(row.accepted_per_pos[:k]), row.num_drafts)
                acceptance.is_prefix |= k < depth
    elif row.al is not None and row.tokens is not None:
        acceptance.add(unit, depth, row.tokens, row.tokens / row.al)
    elif row.al is not None and row.rounds is not None:
        acceptance.add(unit, depth, row.al * row.rounds, row.rounds)
    elif row.tokens is not None and row.rounds is not None:
        acceptance.add(unit, depth, row.tokens, row.rounds)
    elif row.al is not None:
        acceptance.add_length(unit, depth, row.al)


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
