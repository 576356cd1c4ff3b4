"""Times that cannot be right: two units in one table, a mistyped number, a percentage instead of a factor.

A pass over r rows costs at least a plain step and at most r of them; a deeper pass or a longer draft costs more in
proportion to its rows or drafts. A factor of ten beyond that is left to kernels and noise; a time outside it is
refused, since every speedup from it would be wrong. A merely strange time raises a flag (policy.py). Column
names without a unit are ms; a name with a unit (t_draft_ms) shows that the unit is meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from components.contract import UserError
from components.methods import is_trained
from components.speedup.imported.columns import MS_PER_UNIT
from components.speedup.imported.rows import SourcedRow

UNEXPLAINED = 10.0  # a time is a mistake from this factor on, beyond what rows and depth explain
NEARLY_FREE = 1 / 300  # of a plain step; no trained drafter needs less
STEP_TIMES = ("t_target", "t_verify", "t_draft", "t_host")


class StepTime(NamedTuple):
    """One given time. k: depth, 0 for a plain step."""

    name: str
    k: int
    ms: float
    location: str
    has_unit: bool

    def __str__(self) -> str:
        depth = "" if self.name == "t_target" else f" at k = {self.k}"
        return f"{self.name} {self.ms:g} ms{depth}"


def check_times(label: str, rows: Sequence[SourcedRow], tree_budget: int | None) -> None:
    """Refuse times of one drafter at one batch size that contradict each other.

    label: the drafter and batch size, for errors. rows: all its rows, plain steps and every context length included.

    Raises:
        UserError: the first such time, in one line.
    """
    untrained = any(not is_trained(item.row.method) or not is_trained(item.row.drafter) for item in rows)
    for kv_len in sorted({item.row.kv_len or 0 for item in rows}):
        times_by_name = step_times([item for item in rows if (item.row.kv_len or kv_len) == kv_len])
        for name, times in times_by_name.items():
            _check_repeated(label, times)
            if name in ("t_verify", "t_draft"):
                _check_neighbours(label, [t for t in times if t.k and t.ms], tree_budget)
        if "t_target" in times_by_name:
            drafted = [t for times in times_by_name.values() for t in times if t.k]
            _check_beside_plain(label, times_by_name["t_target"][0], drafted, tree_budget, untrained)
    _check_end_to_end(label, rows)


def step_times(rows: Sequence[SourcedRow]) -> dict[str, list[StepTime]]:
    """Column name -> times of that part of a round, in the order of the rows."""
    times_by_name: dict[str, list[StepTime]] = {}
    for item in rows:
        for name in STEP_TIMES:
            ms = getattr(item.row, name)
            if ms is not None:
                depth = 0 if name == "t_target" else item.row.k or 0
                time = StepTime(name, depth, ms, item.location, name in item.units)
                times_by_name.setdefault(name, []).append(time)
    return times_by_name


def explained_factor(name: str, before: int, after: int, tree_budget: int | None) -> float:
    """By what factor a phase may cost more at depth `after` than at `before`, by its rows or drafts."""
    if name == "t_verify":
        return 1.0 if tree_budget else (after + 1) / (before + 1)
    return after / before


def _check_repeated(label: str, times: Sequence[StepTime]) -> None:
    """Refuse repeated times of one phase and depth that lie far apart."""
    for k in sorted({t.k for t in times}):
        same = [t for t in times if t.k == k and t.ms]
        for t in same[1:]:
            if not 1.0 / UNEXPLAINED <= t.ms / same[0].ms <= UNEXPLAINED:
                _refuse(label, t, same[0], "both are of the same thing")


def _check_neighbours(label: str, times: Sequence[StepTime], tree_budget: int | None) -> None:
    """Refuse neighbouring depths that differ by more than depth explains. times: above 0, of one phase."""
    by_depth = {t.k: t for t in reversed(times)}
    for before, after in itertools.pairwise(by_depth[k] for k in sorted(by_depth)):
        explained = explained_factor(before.name, before.k, after.k, tree_budget)
        if after.ms > UNEXPLAINED * explained * before.ms:
            _refuse(label, after, before, f"its depth explains {explained:.3g} times")
        if after.ms < before.ms / UNEXPLAINED:
            _refuse(label, after, before, "a deeper round costs no less")


def _check_beside_plain(
    label: str, plain: StepTime, times: Sequence[StepTime], tree_budget: int | None, untrained: bool
) -> None:
    """Refuse a pass, a draft or host time out of proportion to a plain step."""
    for t in times:
        rows = (tree_budget or t.k) + 1
        if t.ms > UNEXPLAINED * rows * plain.ms:
            _refuse(label, t, plain, f"{rows} rows explain at most {rows} times")
        if t.name == "t_verify" and t.ms < plain.ms / UNEXPLAINED:
            _refuse(label, t, plain, "verifying reads all weights, as a plain step does")
        if t.name == "t_draft" and 0.0 < t.ms < NEARLY_FREE * plain.ms and not (t.has_unit or untrained):
            _refuse(label, t, plain, "nothing that was trained drafts in that (name the column t_draft_ms if it does)")


def _check_end_to_end(label: str, rows: Sequence[SourcedRow]) -> None:
    """Refuse impossible speedups, and times per token out of proportion to those of plain decoding."""
    tpots = [
        (item.row.workload, StepTime("tpot", item.row.k or 0, item.row.tpot, item.location, False))
        for item in rows
        if item.row.tpot
    ]
    plain = [(workload, t) for workload, t in tpots if t.k == 0]
    for workload, t in tpots:
        base = next((b for name, b in plain if name == workload), plain[0][1] if plain else t)
        most = UNEXPLAINED * (t.k + 1)
        if not 1.0 / most <= base.ms / t.ms <= most:
            _refuse(label, t, base, f"a round of depth {t.k} keeps 1 to {t.k + 1} tokens")
    for item in rows:
        most = (item.row.k or 0) + 1
        if item.row.speedup is not None and item.row.speedup > UNEXPLAINED * most:
            raise UserError(
                f"{item.location}: {label}: speedup {item.row.speedup:g} at k = {item.row.k}, where a round keeps at "
                f"most {most} tokens; a speedup is a factor (1.43), no percentage and no tokens/s"
            )


def _refuse(label: str, odd: StepTime, beside: StepTime, explained: str) -> None:
    """Refuse a time that nothing explains, with the likely cause.

    Raises:
        UserError: always.
    """
    ratio = odd.ms / beside.ms
    is_unit = ratio >= 100.0 or ratio <= 0.01
    factor = f"{ratio:.4g} times" if ratio >= 1.0 else f"1/{1.0 / ratio:.4g} of"
    likely = "a column in another unit?" if is_unit else "a mistyped number, another unit, or another setting?"
    names = ", ".join(f"{odd.name}_{unit}" for unit in MS_PER_UNIT)
    raise UserError(
        f"{odd.location}: {label}: {odd} is {factor} {beside} ({beside.location}), and {explained}; {likely} "
        f"Plain names are ms, the name of a column can say otherwise: {names}"
    )
