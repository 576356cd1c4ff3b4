"""Step times of one drafter from its cost cells: the median of block medians, and its resamples.

A cell is the median of one block of repetitions. Per phase and depth we take the median over blocks at each KV length,
then the mean over the KV lengths that every phase was measured at. Times in ms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from components.contract import UserError
from components.rows import CostCell
from components.speedup.bootstrap import Floats, median_draws


class StepTimes(NamedTuple):
    """Times in ms of depths[0] = 0 (plain decoding) .. depths[-1]; index 0 of verify is T_target, of draft 0.

    The same shape serves the estimate ([K + 1]) and its resamples ([draws, K + 1]).
    """

    target: Floats  # [...]
    verify: Floats  # [..., K + 1]
    draft: Floats  # [..., K + 1]
    host: Floats  # [..., K + 1]; zeros where it was not measured


class CostTable(NamedTuple):
    """What was measured for one drafter at one batch size."""

    depths: list[int]  # 0 and every depth with both a verify and a draft cell
    times: StepTimes
    draws: StepTimes
    host_measured: bool
    num_blocks: int
    kernel: str
    dtype: str


class Setting(NamedTuple):
    """What a cost table is of. tree_budget None: a chain. kv_len None: the mean over the measured context lengths."""

    draft_key: str
    batch_size: int
    tree_budget: int | None = None
    kv_len: int | None = None


def cost_table(cells: Sequence[CostCell], setting: Setting, num_draws: int, seed: int) -> CostTable:
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
    values, owners, num_blocks = _cells_by_block(wanted)
    estimate = np.nanmedian(values, axis=1)[None, :]
    return CostTable(
        depths=[0, *depths],
        times=StepTimes(*(part[0] for part in _phases(estimate, owners, depths))),
        draws=_phases(median_draws(values, num_draws, np.random.default_rng([seed, 1])), owners, depths),
        host_measured=host_measured,
        num_blocks=num_blocks,
        kernel=verify[0].kernel,
        dtype=verify[0].dtype,
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

    def cut(times: StepTimes) -> StepTimes:
        return StepTimes(times.target, times.verify[..., keep], times.draft[..., keep], times.host[..., keep])

    return table._replace(depths=[table.depths[i] for i in keep], times=cut(table.times), draws=cut(table.draws))


def _fastest_kernel(cells: list[CostCell]) -> list[CostCell]:
    """The cells of the kernel with the lowest mean time: plain decoding is compared at its best."""
    by_kernel: dict[str, list[float]] = {}
    for cell in cells:
        by_kernel.setdefault(cell.kernel, []).append(cell.median_ns)
    if not by_kernel:
        return []
    best = min(by_kernel, key=lambda name: (float(np.mean(by_kernel[name])), name))
    return [cell for cell in cells if cell.kernel == best]


Owner = tuple[str, int]  # phase, depth


def _cells_by_block(wanted: dict[Owner, list[CostCell]]) -> tuple[Floats, list[Owner], int]:
    """[rows, blocks] of times in ms, one row a (phase, depth, KV length); owners names each row's phase and depth.

    KV lengths that some phase lacks are left out, unless that would leave nothing.
    """
    kv_sets = [{c.kv_len for c in cells} for cells in wanted.values() if cells]
    shared = set.intersection(*kv_sets)
    blocks = sorted({c.block for cells in wanted.values() for c in cells})
    rows: list[Floats] = []
    owners: list[Owner] = []
    for owner, cells in wanted.items():
        for kv_len in sorted({c.kv_len for c in cells if not shared or c.kv_len in shared}):
            row = np.full(len(blocks), np.nan)
            for index, block in enumerate(blocks):
                times = [c.median_ns for c in cells if c.kv_len == kv_len and c.block == block]
                if times:
                    row[index] = float(np.median(times)) / 1e6
            rows.append(row)
            owners.append(owner)
    return np.stack(rows), owners, len(blocks)


def _phases(per_row: Floats, owners: list[Owner], depths: list[int]) -> StepTimes:
    """Average rows of one (phase, depth) over KV lengths. per_row: [draws, rows]."""

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
