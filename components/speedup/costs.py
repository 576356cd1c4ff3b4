"""Step times of one drafter from its cost cells: one steady time a cell, and a curve over depth with what varies.

A cell is one block of repetitions; a fresh process times many of each, in turns with plain steps. Per process, phase,
depth and KV length we take the steady time of its blocks (steady.py), then the mean over the KV lengths that every
phase was measured at, and each round over the plain step of the SAME process. Processes differ in layout and kernels:
they are the units of chance. Where one process was all, parts of its blocks stand in, which leaves out how processes
differ. The times that are shown are scaled so that their sum is the round on the curve (cost_curve.py). Times in ms.
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

MOST_PARTS = 8  # of the blocks of a single process: enough to see its noise, and each still a steady time


class StepTimes(NamedTuple):
    """Times in ms of depths[0] = 0 (plain decoding) .. depths[-1]; index 0 of verify is T_target, of draft 0.

    The same shape serves the estimate ([K + 1]) and the units of chance ([units, K + 1]).
    """

    target: Floats  # [...]
    verify: Floats  # [..., K + 1]
    draft: Floats  # [..., K + 1]
    host: Floats  # [..., K + 1]; zeros where it was not measured


class CostTable(NamedTuple):
    """What was measured for one drafter at one batch size.

    process: [K + 1, units], what each process does to the log of a depth's round over plain decoding, as loadings of
    bootstrap.Estimate. The first num_shared units are processes, the same for every drafter of one measurement; the
    rest are this drafter's own. process_free: [K + 1], degrees of freedom. num_processes: 0 where chance is not known,
    1 where all was timed in one process, so that how processes differ is left out.
    """

    depths: list[int]  # 0 and every depth with both a verify and a draft cell
    times: StepTimes
    process: Floats
    process_free: Floats
    num_shared: int
    num_processes: int
    host_measured: bool
    num_blocks: int
    kernel: str
    dtype: str
    verify_over_plain: Floats  # [K + 1]: T_verify / T_target as measured, before the curve
    contradictions: list[Contradiction]
    streams: tuple[int, int]  # of the random draws: of the processes, and of what is this drafter's own


class Setting(NamedTuple):
    """What a cost table is of. tree_budget None: a chain. kv_len None: the mean over the measured context lengths.

    session: which measurement the cells are of; the drafters of one share its processes.
    """

    draft_key: str
    batch_size: int
    tree_budget: int | None = None
    kv_len: int | None = None
    session: int = 0


def cost_table(cells: Sequence[CostCell], setting: Setting, include_host: bool = True) -> CostTable:
    """The cost table of one drafter from the cells of one measurement.

    Raises UserError when plain steps, or a common depth of verify and draft cells, are missing.
    """
    cells = [c for c in cells if c.batch_size == setting.batch_size and setting.kv_len in (None, c.kv_len)]
    mine = [c for c in cells if c.draft_key in (setting.draft_key, "") and c.tree_budget == setting.tree_budget]
    plain = _fastest_kernel([c for c in cells if c.phase == "target_step"])
    verify = _fastest_kernel([c for c in mine if c.phase == "verify"])
    draft = [c for c in mine if c.phase == "draft" and c.draft_key == setting.draft_key]
    # What a plain step's bookkeeping takes is no matter of trees or chains.
    host = [c for c in mine if c.phase == "host" and c.depth_k > 0]
    host += [c for c in cells if c.phase == "host" and c.depth_k == 0 and c.draft_key in (setting.draft_key, "")]
    depths = sorted({c.depth_k for c in verify} & {c.depth_k for c in draft} - {0})
    if not plain or not depths:
        missing = "target_step cells" if not plain else "a depth with both verify and draft cells"
        raise UserError(
            f"cost of drafter {setting.draft_key[:12]}, batch {setting.batch_size}: {missing} missing; "
            "measure step cost again"
        )
    # Host time counts only if it is known for every depth that is compared; H(0) may be missing, it is then zero.
    host_measured = set(depths) <= {c.depth_k for c in host}
    wanted = {("target_step", 0): plain}
    for k in depths:
        wanted["verify", k] = [c for c in verify if c.depth_k == k]
        wanted["draft", k] = [c for c in draft if c.depth_k == k]
    if host_measured:
        wanted |= {("host", k): [c for c in host if c.depth_k == k] for k in [0, *depths]}
    processes = sorted({c.process for c in plain})
    num_blocks = max(len({c.block for c in found if c.process == p}) for found in wanted.values() for p in processes)
    owners, whole, units = _steady_times(wanted, processes)
    times, by_unit = _phases(whole[None, :], owners, depths), _phases(units.T, owners, depths)
    rounds = by_unit.verify + by_unit.draft + by_unit.host + by_unit.target[:, None]
    if np.isnan(whole).any() or (len(rounds) and np.isnan(rounds).all(axis=0).any()):
        raise UserError(
            f"cost of drafter {setting.draft_key[:12]}: no process timed a whole round of every depth and plain steps; "
            "measure step cost again"
        )
    table = known_table([0, *depths], StepTimes(*(part[0] for part in times)))._replace(
        num_shared=len(units.T),
        num_processes=len(processes),
        host_measured=host_measured,
        num_blocks=num_blocks,
        kernel=verify[0].kernel,
        dtype=verify[0].dtype,
        streams=(setting.session, zlib.crc32(f"{setting.draft_key} {setting.tree_budget}".encode())),
    )
    return _on_curve(table, by_unit, include_host)


def known_table(depths: list[int], times: StepTimes) -> CostTable:
    """A table of times that are taken as they are: nothing tells how far chance could move them."""
    num_depths = len(depths)
    return CostTable(
        depths=depths,
        times=times,
        process=np.zeros((num_depths, 0)),
        process_free=np.full(num_depths, np.inf),
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
    """(plain step [...], round [..., K + 1]) in ms: numerator and denominator of the speedup model."""
    host = times.host if include_host else np.zeros_like(times.host)
    plain = times.target + host[..., 0]
    cycle = times.verify + times.draft + host
    # Depth 0 is plain decoding itself.
    cycle[..., 0] = plain
    return plain, cycle


def _on_curve(table: CostTable, by_unit: StepTimes, include_host: bool) -> CostTable:
    """The table with its rounds on the curve over depth: verification, drafts and host time scaled alike."""
    plain, cycle = round_cost(table.times, include_host)
    unit_plain, unit_cycle = round_cost(by_unit, include_host)
    by_unit_ratio = np.log(unit_cycle / unit_plain[:, None])[:, 1:].T
    # Over processes the mean of their logs, each against its own plain steps; in one process, all blocks at once.
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
        process_free=np.concatenate([[np.inf], curve.free]),
        num_processes=table.num_processes if num_units else 0,
        num_shared=table.num_shared if num_units else 0,
        contradictions=curve.contradictions,
    )


def contexts_of(cells: Sequence[CostCell], draft_key: str, batch_size: int) -> list[int]:
    """KV lengths at which plain steps, verification and drafts were all measured; [] when there are not two."""
    chains = [c for c in cells if c.batch_size == batch_size and c.tree_budget is None]
    by_phase = [
        {c.kv_len for c in chains if c.phase == "target_step"},
        {c.kv_len for c in chains if c.phase == "verify" and c.draft_key in (draft_key, "")},
        {c.kv_len for c in chains if c.phase == "draft" and c.draft_key == draft_key},
    ]
    shared = sorted(set.intersection(*by_phase))
    return shared if len(shared) > 1 else []


def only_depths(table: CostTable, depths: Collection[int]) -> CostTable:
    """The table cut down to those of its depths."""
    keep = [i for i, depth in enumerate(table.depths) if depth in depths]
    times = table.times
    return table._replace(
        depths=[table.depths[i] for i in keep],
        times=StepTimes(times.target, times.verify[..., keep], times.draft[..., keep], times.host[..., keep]),
        process=table.process[keep],
        process_free=table.process_free[keep],
        verify_over_plain=table.verify_over_plain[keep],
        contradictions=[c for c in table.contradictions if c.depth_k in depths],
    )


def cells_to_measure_again(cells: Sequence[CostCell]) -> dict[tuple[str, int], Contradiction]:
    """(draft_key, depth) of the chains whose cost contradicts the curve through the drafter's other depths.

    For a step that is still measuring: cells of every drafter so far, of one batch size or several. A depth that is
    there keeps standing out if it is no accident; measure it again once or twice, not for ever.
    """
    found: dict[tuple[str, int], Contradiction] = {}
    drafts = sorted({(c.draft_key, c.batch_size) for c in cells if c.phase == "draft" and c.tree_budget is None})
    for draft_key, batch_size in drafts:
        table = cost_table([c for c in cells if c.tree_budget is None], Setting(draft_key, batch_size))
        found |= {(draft_key, c.depth_k): c for c in table.contradictions}
    return found


def _fastest_kernel(cells: list[CostCell]) -> list[CostCell]:
    """The cells of the kernel with the lowest time: plain decoding is compared at its best."""
    by_kernel: dict[str, list[float]] = {}
    for cell in cells:
        by_kernel.setdefault(cell.kernel, []).append(cell.median_ns)
    if not by_kernel:
        return []
    best = min(by_kernel, key=lambda name: (steady(by_kernel[name]), name))
    return [cell for cell in cells if cell.kernel == best]


Owner = tuple[str, int]  # phase, depth


def _steady_times(wanted: dict[Owner, list[CostCell]], processes: list[int]) -> tuple[list[Owner], Floats, Floats]:
    """(owners [rows], all together [rows], units of chance [rows, units]) in ms, a row a (phase, depth, KV length).

    KV lengths that some phase lacks are left out, unless that would leave nothing.
    """
    kv_sets = [{c.kv_len for c in cells} for cells in wanted.values() if cells]
    shared = set.intersection(*kv_sets)
    owners: list[Owner] = []
    times: list[dict[int, Floats]] = []  # process -> the times of a row's blocks, in their order
    for owner, cells in wanted.items():
        for kv_len in sorted({c.kv_len for c in cells if not shared or c.kv_len in shared}):
            mine = sorted((c for c in cells if c.kv_len == kv_len), key=lambda c: c.block)
            times.append({p: np.array([c.median_ns / 1e6 for c in mine if c.process == p]) for p in processes})
            owners.append(owner)
    if len(processes) > 1:
        units = np.array([[steady(row[p]) for p in processes] for row in times])
        # Every process weighs the same, however many blocks it timed.
        known = ~np.isnan(units)
        whole = np.where(known, units, 0.0).sum(axis=1) / np.maximum(1, known.sum(axis=1))
        return owners, np.where(known.any(axis=1), whole, np.nan), units
    (only,) = processes
    whole = np.array([steady(row[only]) for row in times])
    num_parts = min(MOST_PARTS, *(len(row[only]) for row in times))
    if num_parts < 2:
        return owners, whole, np.zeros((len(times), 0))
    parts = [[steady(part) for part in np.array_split(row[only], num_parts)] for row in times]
    return owners, whole, np.array(parts)


def _phases(per_row: Floats, owners: list[Owner], depths: list[int]) -> StepTimes:
    """Average rows of one (phase, depth) over KV lengths. per_row: [units, rows]."""

    def mean_of(phase: str, depth: int) -> Floats:
        index = [i for i, owner in enumerate(owners) if owner == (phase, depth)]
        return per_row[:, index].mean(axis=1) if index else np.zeros(len(per_row))

    target = mean_of("target_step", 0)
    return StepTimes(
        target=target,
        verify=np.stack([target, *(mean_of("verify", k) for k in depths)], axis=1),
        draft=np.stack([np.zeros_like(target), *(mean_of("draft", k) for k in depths)], axis=1),
        host=np.stack([mean_of("host", 0), *(mean_of("host", k) for k in depths)], axis=1),
    )
