"""Step times of one drafter from its cost cells: a steady time for each cell, and a curve over depth with its error.

A cell is one block of repetitions; a fresh process times many of each, in turns with plain steps. For each process,
phase, depth and KV length the steady time of the blocks is taken (definitions.steady), then the mean over the KV
lengths of all phases, and each round over the plain step of the SAME process. Processes differ in layout and kernels:
they are the units of chance. Parts of its blocks replace a single process, which leaves out how processes differ. The
times are scaled so that their sum is the round on the curve. Times in ms.

The cost of a round is a curve over depth, which smooths the noise of single cells and keeps steps that are real. x_ks
is the log of a round's time at depth k over plain decoding's, in process s (of a single process: in a part of its
blocks). Over depth the ratio is close to a straight line: each draft adds its own time and a row to verify. Empirical
Bayes (after Efron & Morris 1973) shrinks each depth towards the line:
    curve_k = w cell_k + (1 - w) line_k,   w = tau^2 / (tau^2 + se^2)
where se^2 is the variance of one cell, from the differences of processes about the line beyond a shift and a tilt of
each, and tau^2 the spread of cells about the line, at least LEAST_STEP^2. Subtracting se^2 from that spread, as James
and Stein do, loses more where a step is real than it gains elsewhere (tests: prediction/test_predict.py). What
processes share (one of them had a slow plain baseline) moves the whole line and leaves its shape. Deeper rounds do more
work, so the curve never falls, unless the data show a fall.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from components.contract import UserError
from components.definitions import steady
from components.rows import CostCell, grouped
from components.speedup.bootstrap import Floats, student_cdf, student_quantile

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
    by_kernel = grouped(cells, lambda cell: cell.kernel)
    best = min(by_kernel, key=lambda name: (steady([cell.median_ns for cell in by_kernel[name]]), name), default="")
    return by_kernel.get(best, [])


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


LEAST_STEP = 0.005  # least assumed unevenness of kernels over depth, a share of a round
CONFIDENCE = 0.99  # of a contradiction, over all depths of a drafter together
ROUNDING_NOISE = 1e-9  # noise up to this is rounding
MIN_DEVIATION = 0.02  # of a contradiction, a share of a round's time; less changes no choice


class Contradiction(NamedTuple):
    """A depth whose cost misses the curve through the others by more than chance. by: share of its time."""

    depth_k: int
    by: float
    falls: bool  # whether it costs less than a shallower depth; else it lies off the line


class Curve(NamedTuple):
    """Log cost ratios over depth, with the effect of each process on them.

    log_ratio: [K]. process: [K, units], loadings as in bootstrap.Estimate; the last K columns belong to one depth each.
    dof: [K], degrees of freedom of that variance at each depth.
    """

    log_ratio: Floats
    process: Floats
    dof: Floats
    contradictions: list[Contradiction]


def cost_curve(depths: Sequence[int], by_unit: Floats, whole: Floats | None = None) -> Curve:
    """The curve through measured costs.

    depths: K of them, ascending, from 1 up. by_unit: [K, units], log ratios in each unit, NaN where one did not measure
    a depth. whole: [K], over all measurements; None: the mean over units. With fewer than two units chance is not
    known, and the cells are returned as they are.
    """
    num_depths, num_units = by_unit.shape
    if num_units < 2:
        assert whole is not None, "without units there is nothing to take a mean of"
        return Curve(whole, np.zeros((num_depths, 0)), np.full(num_depths, math.inf), [])
    mean, deviation = _fit_units(by_unit)
    value = mean if whole is None else whole
    line, noise, noise_dof = _line_and_noise(depths, value, deviation)
    offset = np.log(line.sum(axis=1))  # distance of the line from each cell, in log
    weight = _weight_of_cells(offset, noise, num_depths)
    smooth = weight * np.eye(num_depths) + (1.0 - weight) * line
    log_ratio = value + np.log(weight + (1.0 - weight) * line.sum(axis=1))
    count = (~np.isnan(by_unit)).sum(axis=1, keepdims=True).astype(float)
    loading = smooth @ (deviation / np.sqrt(count * np.maximum(1.0, count - 1.0)))
    own_error = np.full(num_depths, math.sqrt(weight * (1.0 - weight)) * noise)
    if num_depths <= 2:
        noise_dof = math.inf
    outliers = _find_outliers(depths, value, noise, noise_dof)
    log_ratio, loading, falls = _make_monotone(depths, log_ratio, loading, own_error, num_units)
    variance, own_variance = (loading**2).sum(axis=1), own_error**2
    spread = variance**2 / (num_units - 1) + own_variance**2 / max(1.0, noise_dof)
    dof = np.where(spread > 0.0, (variance + own_variance) ** 2 / np.where(spread > 0.0, spread, 1.0), math.inf)
    process = np.concatenate([loading, np.diag(own_error)], axis=1)
    return Curve(log_ratio, process, dof, _one_per_depth(depths, outliers, falls))


def _one_per_depth(
    depths: Sequence[int], outliers: Sequence[Contradiction], falls: Sequence[Contradiction]
) -> list[Contradiction]:
    """At most one contradiction a depth. A fall counts for the deeper depth, unless the one before it is an outlier."""
    by_depth = {outlier.depth_k: outlier for outlier in outliers}
    for fall in falls:
        before = depths[depths.index(fall.depth_k) - 1]
        if before not in by_depth or fall.depth_k in by_depth:
            by_depth[fall.depth_k] = fall
    return [by_depth[depth] for depth in sorted(by_depth)]


def _fit_units(by_unit: Floats) -> tuple[Floats, Floats]:
    """(mean at each depth, deviation of each unit from it, 0 where not measured). Depths and units are fitted together,
    so that a slow unit with other depths than the rest does not make these look slow."""
    measured = ~np.isnan(by_unit)
    filled = np.where(measured, by_unit, 0.0)
    unit, depth = np.zeros(by_unit.shape[1]), np.zeros(by_unit.shape[0])
    for _ in range(1 if measured.all() else 50):
        depth = np.where(measured, filled - unit, 0.0).sum(axis=1) / measured.sum(axis=1)
        unit = np.where(measured, filled - depth[:, None], 0.0).sum(axis=0) / np.maximum(1, measured.sum(axis=0))
        unit -= unit.mean()
    return depth, np.where(measured, filled - depth[:, None], 0.0)


def _line_and_noise(depths: Sequence[int], value: Floats, deviation: Floats) -> tuple[Floats, float, float]:
    """([K, K] projection on straight lines in relative units, standard error of one cell, its degrees of freedom)."""
    if len(depths) <= 2:
        return np.eye(len(depths)), 0.0, math.inf
    line = _line(depths, value)
    num_units = deviation.shape[1]
    residual = deviation - line @ deviation
    dof = float((len(depths) - 2) * (num_units - 1))
    return line, math.sqrt(float((residual**2).sum()) / dof / num_units), dof


def _line(depths: Sequence[int], value: Floats) -> Floats:
    """[K, K] projection of relative costs on straight lines over depth; row sums are line / cell."""
    columns = np.stack([np.ones(len(depths)), np.asarray(depths, dtype=float)], axis=1) / np.exp(value)[:, None]
    return np.asarray(columns @ np.linalg.pinv(columns))


def _relative_offset(line: Floats) -> Floats:
    """[K]: the share of its cost by which each cell lies above the line through the others."""
    return np.asarray((1.0 - line.sum(axis=1)) / np.maximum(1e-9, 1.0 - np.diag(line)))


def _weight_of_cells(offset: Floats, noise: float, num_depths: int) -> float:
    """w: the share of a cell's distance from the line that is kept."""
    if num_depths <= 2 or noise <= ROUNDING_NOISE:
        return 1.0
    tau_squared = max(LEAST_STEP**2, float((offset**2).sum()) / (num_depths - 2))
    return tau_squared / (tau_squared + noise**2)


def _find_outliers(depths: Sequence[int], value: Floats, noise: float, dof: float) -> list[Contradiction]:
    """Cells off the line through the others; the worst is removed first, since it pulls the line away from the rest."""
    outliers: list[Contradiction] = []
    remaining = list(range(len(depths)))
    while len(remaining) > 2 and noise > ROUNDING_NOISE:
        line = _line([depths[i] for i in remaining], value[remaining])
        deviation = _relative_offset(line)
        sureness = np.abs(deviation) * np.sqrt(np.maximum(1e-9, 1.0 - np.diag(line))) / noise
        worst = int(sureness.argmax())
        limit = student_quantile(1.0 - (1.0 - CONFIDENCE) / 2.0 / len(depths), dof)
        if sureness[worst] <= limit or abs(deviation[worst]) < MIN_DEVIATION:
            break
        outliers.append(Contradiction(depths[remaining.pop(worst)], float(deviation[worst]), False))
    return outliers


def _make_monotone(
    depths: Sequence[int], log_ratio: Floats, loading: Floats, own_error: Floats, num_units: int
) -> tuple[Floats, Floats, list[Contradiction]]:
    """Neighbours that fall within chance share their mean (pool adjacent violators); other falls are returned."""
    falls, blocks = [], [[0]]
    for i in range(1, len(depths)):
        drop = float(log_ratio[i] - log_ratio[i - 1])
        variance = float(((loading[i] - loading[i - 1]) ** 2).sum() + own_error[i] ** 2 + own_error[i - 1] ** 2)
        spread = math.sqrt(variance)
        blocks.append([i])
        is_real = spread <= ROUNDING_NOISE or student_cdf(drop / spread, num_units - 1.0) < 1.0 - CONFIDENCE
        if drop < -ROUNDING_NOISE and is_real:
            falls.append(Contradiction(depths[i], drop, True))
            blocks[-1] = [-1, i]  # a barrier: a real fall is not averaged with the depth before it
            continue
        while (
            len(blocks) > 1
            and blocks[-1][0] != -1
            and _block_mean(log_ratio, blocks[-1]) < _block_mean(log_ratio, blocks[-2])
        ):
            last = blocks.pop()
            blocks[-1] += last
    share = np.zeros((len(depths), len(depths)))
    for block in blocks:
        members = [i for i in block if i >= 0]
        share[np.ix_(members, members)] = 1.0 / len(members)
    return share @ log_ratio, share @ loading, falls


def _block_mean(values: Floats, block: Sequence[int]) -> float:
    return float(np.mean([values[i] for i in block if i >= 0]))
