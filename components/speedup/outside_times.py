"""Times that no depth explains: two units in one table, a mistyped number, a percentage for a factor.

One pass over r rows costs no less than a plain step and no more than r of them; a deeper pass or a longer draft costs
more by the rows or drafts that it has more. Ten times that is left to kernels and noise. What lies beyond is refused:
there, no machine would be measured and every speedup would be wrong. What is merely strange is a flag
(outside_doubts.py). Plain names are ms; a name with a unit (t_draft_ms) says that the unit is meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from components.contract import UserError
from components.rows import UNTRAINED
from components.speedup.outside_columns import MS_PER_UNIT
from components.speedup.outside_rows import Placed

UNEXPLAINED = 10.0  # factor beyond what rows and depth explain, from which on a time is a mistake
NEARLY_FREE = 1 / 300  # of a plain step: nothing that was trained drafts in less
STEP_TIMES = ("t_target", "t_verify", "t_draft", "t_host")


class Timed(NamedTuple):
    """One time as it was told. k: 0 for a plain step."""

    name: str
    k: int
    ms: float
    where: str
    has_unit: bool

    def __str__(self) -> str:
        depth = "" if self.name == "t_target" else f" at k = {self.k}"
        return f"{self.name} {self.ms:g} ms{depth}"


def check_times(of: str, placed: Sequence[Placed], tree_budget: int | None) -> None:
    """Refuse times of one drafter at one batch size that cannot stand beside each other.

    of: what errors call them. placed: their rows, plain steps included, over all context lengths.

    Raises:
        UserError: the first such time, in one line.
    """
    untrained = any(p.row.method in UNTRAINED or p.row.drafter in UNTRAINED for p in placed)
    for kv_len in sorted({p.row.kv_len or 0 for p in placed}):
        told = step_times([p for p in placed if (p.row.kv_len or kv_len) == kv_len])
        for name, times in told.items():
            _repeated(of, times)
            if name in ("t_verify", "t_draft"):
                _neighbours(of, [t for t in times if t.k and t.ms], tree_budget)
        if "t_target" in told:
            drafted = [t for times in told.values() for t in times if t.k]
            _beside_plain(of, told["t_target"][0], drafted, tree_budget, untrained)
    _end_to_end(of, placed)


def step_times(placed: Sequence[Placed]) -> dict[str, list[Timed]]:
    """Times of the parts of a round by their names, in the order of the rows."""
    told: dict[str, list[Timed]] = {}
    for p in placed:
        for name in STEP_TIMES:
            ms = getattr(p.row, name)
            if ms is not None:
                depth = 0 if name == "t_target" else p.row.k or 0
                told.setdefault(name, []).append(Timed(name, depth, ms, p.where, name in p.units))
    return told


def explained_factor(name: str, before: int, after: int, tree_budget: int | None) -> float:
    """How many times as much a phase may cost at depth `after` as at `before`, by its rows or drafts."""
    if name == "t_verify":
        return 1.0 if tree_budget else (after + 1) / (before + 1)
    return after / before


def _repeated(of: str, times: Sequence[Timed]) -> None:
    """Times of one thing lie near each other."""
    for k in sorted({t.k for t in times}):
        same = [t for t in times if t.k == k and t.ms]
        for t in same[1:]:
            if not 1.0 / UNEXPLAINED <= t.ms / same[0].ms <= UNEXPLAINED:
                _refuse(of, t, same[0], "both are of the same thing")


def _neighbours(of: str, times: Sequence[Timed], tree_budget: int | None) -> None:
    """Neighbouring depths differ by no more than they explain. times: above 0, of one phase."""
    by_depth = {t.k: t for t in reversed(times)}
    for before, after in itertools.pairwise(by_depth[k] for k in sorted(by_depth)):
        explained = explained_factor(before.name, before.k, after.k, tree_budget)
        if after.ms > UNEXPLAINED * explained * before.ms:
            _refuse(of, after, before, f"its depth explains {explained:.3g} times")
        if after.ms < before.ms / UNEXPLAINED:
            _refuse(of, after, before, "a deeper round costs no less")


def _beside_plain(of: str, plain: Timed, times: Sequence[Timed], tree_budget: int | None, untrained: bool) -> None:
    """A pass, a draft and the rest of a round beside one plain step."""
    for t in times:
        rows = (tree_budget or t.k) + 1
        if t.ms > UNEXPLAINED * rows * plain.ms:
            _refuse(of, t, plain, f"{rows} rows explain at most {rows} times")
        if t.name == "t_verify" and t.ms < plain.ms / UNEXPLAINED:
            _refuse(of, t, plain, "verifying reads all weights, as a plain step does")
        if t.name == "t_draft" and 0.0 < t.ms < NEARLY_FREE * plain.ms and not (t.has_unit or untrained):
            _refuse(of, t, plain, "nothing that was trained drafts in that (name the column t_draft_ms if it does)")


def _end_to_end(of: str, placed: Sequence[Placed]) -> None:
    """Speedups, and times per token beside plain decoding's."""
    tpots = [(p.row.workload, Timed("tpot", p.row.k or 0, p.row.tpot, p.where, False)) for p in placed if p.row.tpot]
    plain = [(workload, t) for workload, t in tpots if t.k == 0]
    for workload, t in tpots:
        base = next((b for name, b in plain if name == workload), plain[0][1] if plain else t)
        most = UNEXPLAINED * (t.k + 1)
        if not 1.0 / most <= base.ms / t.ms <= most:
            _refuse(of, t, base, f"a round of depth {t.k} keeps 1 to {t.k + 1} tokens")
    for p in placed:
        most = (p.row.k or 0) + 1
        if p.row.speedup is not None and p.row.speedup > UNEXPLAINED * most:
            raise UserError(
                f"{p.where}: {of}: speedup {p.row.speedup:g} at k = {p.row.k}, where a round keeps at most {most} "
                "tokens; a speedup is a factor (1.43), no percentage and no tokens/s"
            )


def _refuse(of: str, odd: Timed, beside: Timed, explained: str) -> None:
    """A time that nothing explains, with what it probably is.

    Raises:
        UserError: always.
    """
    ratio = odd.ms / beside.ms
    is_unit = ratio >= 100.0 or ratio <= 0.01
    factor = f"{ratio:.4g} times" if ratio >= 1.0 else f"1/{1.0 / ratio:.4g} of"
    likely = "a column in another unit?" if is_unit else "a mistyped number, another unit, or another setting?"
    names = ", ".join(f"{odd.name}_{unit}" for unit in MS_PER_UNIT)
    raise UserError(
        f"{odd.where}: {of}: {odd} is {factor} {beside} ({beside.where}), and {explained}; {likely} "
        f"Plain names are ms, the name of a column can say otherwise: {names}"
    )
