"""Step times of one drafter from its cost cells: a steady time for each cell, and a curve over depth with its error.

A cell is one block of repetitions; a fresh process times many of each, in turns with plain steps. For each process,
phase, depth and KV length the steady time of the blocks is taken (steady.py), then the mean over the KV lengths of all
phases, and each round over the plain step of the SAME process. Processes differ in layout and kernels: they are the
units of chance. Parts of its blocks replace a single process, which leaves out how processes differ. The times are
scaled so that their sum is the round on the curve (cost_curve.py). Times in ms.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from components.contract import UserError
from components.rows import CostCell
from components.speedup.bootstrap import Floats
from components.speedup.cost_curve import Contradiction, cost_curve
from components.speedup.steady import steady

MAX_PARTS = 8  # of a single process' blocks: enough to show its noise, each still a steady time


class StepTimes(NamedTuple):
    """Times in ms of depths[0] = 0 (plain decoding) .. depths[-1]; index 0 of verify is T_target, of draft 0.

    The same shape serves the estimate ([K + 1]) and the units of chance ([units, K + 1]).
    """

    target: Floats  # [...]
    verify: Floats  # [..., K + 1]
    draft: Floats  # [..., K + 1]
    host: Floats  # [..., K + 1]; zeros where it was not measured


class CostTable(NamedTuple):
    """The measured costs of one drafter at one batch size.

    process: [K + 1, units], effect of each unit on the log of a depth's round over plain decoding, as loadings of
    bootstrap.Estimate. The first num_shared units are processes, shared by all drafters of one measurement; the others
    belong to this drafter. process_dof: [K + 1], degrees of freedom. num_processes: 0 where chance is not known, 1 for
    a single process, which leaves out how processes differ.
    """

    depths: list[int]  # 0 and every depth with both a verify and a draft cell
    times: StepTimes
    process: Floats
    process_dof: Floats
    num_shared: int
    num_processes: int
    host_measured: bool
    num_blocks: int
    kernel: str
    dtype: str
    verify_over_plain: Floats  # [K + 1]: T_verify / T_target as measured, before the curve
    contradictions: list[Contradiction]
    streams: tuple[int, int]  # of random draws: those of the processes, and those of this drafter


class Setting(NamedTuple):
    """The drafter and conditions of a cost table. tree_budget None: a chain. kv_len None: the mean over KV lengths.

    session: index of the measurement that the cells come from; its drafters share its processes.
    """

    draft_key: str
    batch_size: int
    tree_budget: int | None = None
    kv_len: int | None = None
    session: int = 0


def cost_table(cells: Sequence[CostCell], setting: Setting, include_host: bool = True) -> CostTable:
    """The cost table of one drafter from the cells of one measurement.

    Raises:
        UserError: plain steps, or a common depth of verify and draft cells, are missing.
    """
    cells = [c for c in cells if c.batch_size == setting.batch_size and setting.kv_len in (None, c.kv_len)]
    keys = (setting.draft_key, "")
    drafter_cells = [c for c in cells if c.draft_key in keys and c.tree_budget == setting.tree_budget]
    plain = _fastest_kernel([c for c in cells if c.phase == "target_step"])
    verify = _fastest_kernel([c for c in drafter_cells if c.phase == "verify"])
    draft = [c for c in drafter_cells if c.phase == "draft" and c.draft_key == setting.draft_key]
    # Host time of a plain step is the same for trees and chains.
    host = [c for c in drafter_cells if c.phase == "host" and c.depth_k > 0]
    host += [c for c in cells if c.phase == "host" and c.depth_k == 0 and c.draft_key in keys]
    depths = sorted({c.depth_k for c in verify} & {c.depth_k for c in draft} - {0})
    if not plain or not depths:
        missing = "target_step cells" if not plain else "a depth with both verify and draft cells"
        raise UserError(
            f"cost of drafter {setting.draft_key[:12]}, batch {setting.batch_size}: {missing} missing; "
            "measure step cost again"
        )
    # Host time counts only where every compared depth has it; a missing H(0) is zero.
    host_measured = set(depths) <= {c.depth_k for c in host}
    cells_by_phase = {("target_step", 0): plain}
    for k in depths:
        cells_by_phase["verify", k] = [c for c in verify if c.depth_k == k]
        cells_by_phase["draft", k] = [c for c in draft if c.depth_k == k]
    if host_measured:
        cells_by_phase |= {("host", k): [c for c in host if c.depth_k == k] for k in [0, *depths]}
    processes = sorted({c.process for c in plain})
    num_blocks = max(
        len({c.block for c in some if c.process == p}) for some in cells_by_phase.values() for p in processes
    )
    row_phases, whole, units = _steady_times(cells_by_phase, processes)
    times = _mean_over_lengths(whole[None, :], row_phases, depths)
    by_unit = _mean_over_lengths(units.T, row_phases, depths)
    rounds = by_unit.verify + by_unit.draft + by_unit.host + by_unit.target[:, None]
    if np.isnan(whole).any() or (len(rounds) and np.isnan(rounds).all(axis=0).any()):
        raise UserError(
            f"cost of drafter {setting.draft_key[:12]}: no process timed a whole round of every depth and plain steps; "
            "measure step cost again"
        )
    table = exact_table([0, *depths], StepTimes(*(part[0] for part in times)))._replace(
        num_shared=len(units.T),
        num_processes=len(processes),
        host_measured=host_measured,
        num_blocks=num_blocks,
        kernel=verify[0].kernel,
        dtype=verify[0].dtype,
        streams=(setting.session, zlib.crc32(f"{setting.draft_key} {setting.tree_budget}".encode())),
    )
    return _fit_to_curve(table, by_unit, include_host)


def exact_table(depths: list[int], times: StepTimes) -> CostTable:
    """A table of times taken as exact, without any chance."""
    num_depths = len(depths)
    return CostTable(
        depths=depths,
        times=times,
        process=np.zeros((num_depths, 0)),
        process_dof=np.full(num_depths, np.inf),
        num_shared=0,
        num_processes=0,
        host_measured=False,
        num_blocks=1,
        kernel="",
        dtype="",
        verify_over_plain=times.verify / times.target,
        contradictions=[],
        streams=(0, 0),
    )


def round_cost(times: StepTimes, include_host: bool) -> tuple[Floats, Floats]:
    """(plain step [...], round [..., K + 1]) in ms: the times of the speedup model."""
    host = times.host if include_host else np.zeros_like(times.host)
    plain = times.target + host[..., 0]
    cycle = times.verify + times.draft + host
    # Depth 0 is plain decoding itself.
    cycle[..., 0] = plain
    return plain, cycle


def _fit_to_curve(table: CostTable, by_unit: StepTimes, include_host: bool) -> CostTable:
    """The table with its rounds on the curve over depth: verification, drafts and host time scaled alike."""
    plain, cycle = round_cost(table.times, include_host)
    unit_plain, unit_cycle = round_cost(by_unit, include_host)
    by_unit_ratio = np.log(unit_cycle / unit_plain[:, None])[:, 1:].T
    # Of several processes, the mean of their log ratios; of a single one, all its blocks together.
    value = None if table.num_processes > 1 else np.log(cycle / plain)[1:]
    curve = cost_curve(table.depths[1:], by_unit_ratio, value)
    scale = np.concatenate([[1.0], np.exp(curve.log_ratio) * plain / cycle[1:]])
    num_units = curve.process.shape[1]
    return table._replace(
        times=table.times._replace(
            verify=table.times.verify * scale,
            draft=table.times.draft * scale,
            host=table.times.host * scale if include_host else table.times.host,
        ),
        process=np.concatenate([np.zeros((1, num_units)), curve.process]),
        process_dof=np.concatenate([[np.inf], curve.dof]),
        num_processes=table.num_processes if num_units else 0,
        num_shared=table.num_shared if num_units else 0,
        contradictions=curve.contradictions,
    )


def contexts_of(cells: Sequence[CostCell], draft_key: str, batch_size: int) -> list[int]:
    """KV lengths at which plain steps, verification and drafts were all measured; [] for fewer than two."""
    chains = [c for c in cells if c.batch_size == batch_size and c.tree_budget is None]
    by_phase = [
        {c.kv_len for c in chains if c.phase == "target_step"},
        {c.kv_len for c in chains if c.phase == "verify" and c.draft_key in (draft_key, "")},
        {c.kv_len for c in chains if c.phase == "draft" and c.draft_key == draft_key},
    ]
    shared = sorted(set.intersection(*by_phase))
    return shared if len(shared) > 1 else []


def select_depths(table: CostTable, depths: Collection[int]) -> CostTable:
    """The table limited to these depths."""
    keep = [i for i, depth in enumerate(table.depths) if depth in depths]
    times = table.times
    return table._replace(
        depths=[table.depths[i] for i in keep],
        times=StepTimes(times.target, times.verify[..., keep], times.draft[..., keep], times.host[..., keep]),
        process=table.process[keep],
        process_dof=table.process_dof[keep],
        verify_over_plain=table.verify_over_plain[keep],
        contradictions=[c for c in table.contradictions if c.depth_k in depths],
    )


def cells_to_measure_again(cells: Sequence[CostCell]) -> dict[tuple[str, int], Contradiction]:
    """(draft_key, depth) of the chains whose cost contradicts the curve through the drafter's other depths.

    cells: those of every drafter so far, of one batch size or several, for a step that is still measuring. A real
    contradiction stays after more measurements: measure it again once or twice only.
    """
    contradictions: dict[tuple[str, int], Contradiction] = {}
    drafts = sorted({(c.draft_key, c.batch_size) for c in cells if c.phase == "draft" and c.tree_budget is None})
    for draft_key, batch_size in drafts:
        table = cost_table([c for c in cells if c.tree_budget is None], Setting(draft_key, batch_size))
        contradictions |= {(draft_key, c.depth_k): c for c in table.contradictions}
    return contradictions


def _fastest_kernel(cells: list[CostCell]) -> list[CostCell]:
    """The cells of the fastest kernel: plain decoding is compared at its best."""
    by_kernel: dict[str, list[float]] = {}
    for cell in cells:
        by_kernel.setdefault(cell.kernel, []).append(cell.median_ns)
    if not by_kernel:
        return []
    best = min(by_kernel, key=lambda name: (steady(by_kernel[name]), name))
    return [cell for cell in cells if cell.kernel == best]


PhaseDepth = tuple[str, int]  # phase, depth


def _steady_times(
    cells_by_phase: dict[PhaseDepth, list[CostCell]], processes: list[int]
) -> tuple[list[PhaseDepth], Floats, Floats]:
    """(phase and depth of each row, whole [rows], units of chance [rows, units]) in ms, a row per KV length as well.

    KV lengths that some phase lacks are left out, unless no other is left.
    """
    kv_sets = [{c.kv_len for c in cells} for cells in cells_by_phase.values() if cells]
    shared = set.intersection(*kv_sets)
    row_phases: list[PhaseDepth] = []
    times: list[dict[int, Floats]] = []  # of each row: process -> times of its blocks, in order
    for phase_depth, cells in cells_by_phase.items():
        for kv_len in sorted({c.kv_len for c in cells if not shared or c.kv_len in shared}):
            at_length = sorted((c for c in cells if c.kv_len == kv_len), key=lambda c: c.block)
            times.append({p: np.array([c.median_ns / 1e6 for c in at_length if c.process == p]) for p in processes})
            row_phases.append(phase_depth)
    if len(processes) > 1:
        units = np.array([[steady(row[p]) for p in processes] for row in times])
        # Every process weighs the same, however many blocks it timed.
        measured = ~np.isnan(units)
        whole = np.where(measured, units, 0.0).sum(axis=1) / np.maximum(1, measured.sum(axis=1))
        return row_phases, np.where(measured.any(axis=1), whole, np.nan), units
    (only,) = processes
    whole = np.array([steady(row[only]) for row in times])
    num_parts = min(MAX_PARTS, *(len(row[only]) for row in times))
    if num_parts < 2:
        return row_phases, whole, np.zeros((len(times), 0))
    parts = [[steady(part) for part in np.array_split(row[only], num_parts)] for row in times]
    return row_phases, whole, np.array(parts)


def _mean_over_lengths(per_row: Floats, row_phases: list[PhaseDepth], depths: list[int]) -> StepTimes:
    """Average the rows of each phase and depth over KV lengths. per_row: [units, rows]."""

    def mean_of(phase: str, depth: int) -> Floats:
        index = [i for i, phase_depth in enumerate(row_phases) if phase_depth == (phase, depth)]
        return per_row[:, index].mean(axis=1) if index else np.zeros(len(per_row))

    target = mean_of("target_step", 0)
    return StepTimes(
        target=target,
        verify=np.stack([target, *(mean_of("verify", k) for k in depths)], axis=1),
        draft=np.stack([np.zeros_like(target), *(mean_of("draft", k) for k in depths)], axis=1),
        host=np.stack([mean_of("host", 0), *(mean_of("host", k) for k in depths)], axis=1),
    )
