"""Rows that cannot be right: facts that contradict each other, lengths that no text has, times that no machine takes.

Each is refused with an error of one line: the place, the fault and the remedy. What is odd but possible becomes a flag
instead (policy.py).

Facts contradict each other where one is given twice, or a total stands beside its parts. Acceptance lengths are of one
text: rounds at depth k cover the text. One of them covers c kept drafts and a bonus token; rounds of a deeper m that
begin in there keep at most m c drafts between them, wherever they begin. So
    1 - 1 / AL(m) <= m (1 - 1 / AL(k)),    k < m,    where 1 - 1 / AL is the share of tokens that were drafted.
For one set of rounds AL(m) - AL(k) <= m - k holds as well, and AL grows ever less with depth. Runs at different depths
begin their rounds elsewhere and may break both: 2, 1, 0 kept in turn gives AL(1) = 1.5, AL(2) = 3. Those are flags.

Times are of two units in one table, mistyped, or a percentage instead of a factor. A pass over r rows costs at least a
plain step and at most r of them; a deeper pass or a longer draft costs more in proportion to its rows or drafts. A
factor of ten beyond that is left to kernels and noise; a time outside it is refused, since every speedup from it would
be wrong. Column names without a unit are ms; a name with a unit (t_draft_ms) shows that the unit is meant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from components.contract import UserError
from components.methods import is_trained
from components.rows import grouped
from components.speedup.imported.columns import MS_PER_UNIT
from components.speedup.imported.evidence import (
    DraftSetting,
    acceptance_from,
    is_shared,
    label_of,
    position_chains,
    setting_of,
)
from components.speedup.imported.rows import ImportedRow, SourcedRow

ROUNDED = 0.05  # largest rounding error of a length that is printed with one decimal

BY_DEPTH = "by depth"


def check_together(rows: Sequence[SourcedRow]) -> None:
    """Refuse rows that contradict each other.

    Raises:
        UserError: the first contradiction, in one line.
    """
    _check_unique(rows)
    acceptance_rows = _by_setting(item for item in rows if item.row.has_acceptance)
    for (setting, batch_size), setting_rows in acceptance_rows.items():
        label = _label(setting, batch_size)
        _check_parts_or_total(label, setting_rows)
        _check_chains(label, setting_rows)
        # Rows of one workload and context length describe one text.
        for text_rows in grouped(setting_rows, lambda item: (item.row.workload, item.row.kv_len)).values():
            _check_one_text(label, text_rows)
    by_setting = _by_setting(item for item in rows if not is_shared(item.row))
    shared = [item for item in rows if is_shared(item.row)]
    for setting, batch_size in {**by_setting, **_by_setting(shared)}:
        shared_rows = [item for item in shared if item.row.batch_size == batch_size]
        check_times(_label(setting, batch_size), by_setting.get((setting, batch_size), []) + shared_rows, setting[2])


def _by_setting(rows: Iterable[SourcedRow]) -> dict[tuple[DraftSetting, int], list[SourcedRow]]:
    """Rows by drafter, setting and batch size."""
    return grouped(rows, lambda item: (setting_of(item.row), item.row.batch_size))


def _label(setting: DraftSetting, batch_size: int) -> str:
    return f"{label_of(setting)}, batch {batch_size}"


def _check_unique(rows: Sequence[SourcedRow]) -> None:
    """Refuse a fact that is given twice, unless `rep` or `block` numbers it; a figure for all prompts may be."""
    first_told: dict[tuple[object, ...], tuple[SourcedRow, object]] = {}
    for item in rows:
        row = item.row
        belongs = (setting_of(row), row.workload, row.batch_size, row.kv_len, row.prompt, row.rep, row.block)
        for name, at, value in _facts(row):
            before, earlier = first_told.setdefault((name, at, *belongs), (item, value))
            may_repeat = value == BY_DEPTH or (row.prompt is None and not row.is_counted)
            if before is item or (may_repeat and earlier == value):
                continue
            whose = label_of(setting_of(row)) if row.prompt is None else f"prompt {row.prompt}"
            depth = "" if at is None else f" at k = {at}"
            raise UserError(
                f"{item.location}: {name} of {whose}{depth} was already told ({before.location}); number repetitions "
                "in a column rep, or tell cases apart by prompt, workload, drafter, batch_size or kv_len"
            )


def _facts(row: ImportedRow) -> list[tuple[str, int | None, object]]:
    """(name, depth, value) of everything in a row that may be given only once."""
    facts: list[tuple[str, int | None, object]] = []
    if row.speedup is not None:
        facts.append(("speedup", row.k, row.speedup))
    if row.tpot is not None:
        facts.append(("tpot", row.k, row.tpot))
    if row.has_acceptance and row.accepted is None:
        positions = tuple(row.accepted_per_pos or ())
        facts.append(("acceptance", row.k, (row.al, row.p, row.tokens, row.rounds, row.num_drafts, positions)))
    if row.has_acceptance:
        # A map covers every depth: no other acceptance may stand beside it.
        facts.append(("acceptance", None, BY_DEPTH if row.accepted is None else tuple(row.accepted)))
    return facts


def _check_parts_or_total(label: str, rows: Sequence[SourcedRow]) -> None:
    """All rows of a drafter name a prompt, a workload and counts, or none does: parts and a total would count twice."""
    for name in ("workload", "prompt"):
        without = next((item for item in rows if getattr(item.row, name) is None), None)
        with_it = next((item for item in rows if getattr(item.row, name) is not None), None)
        if without is not None and with_it is not None:
            raise UserError(
                f"{without.location}: {label}: acceptance names no {name}, at {with_it.location} it does; a total "
                f"beside its parts would count twice: give one of them, or name the {name} in every row"
            )
    bare = next((item for item in rows if not item.row.is_counted), None)
    counted = next((item for item in rows if item.row.is_counted), None)
    num_units = len({(item.row.workload, item.row.prompt) for item in rows})
    if bare is not None and counted is not None and num_units > 1:
        raise UserError(
            f"{bare.location}: {label}: a length without tokens or rounds cannot be weighed against the counts at "
            f"{counted.location}; give tokens or rounds beside it"
        )


def _check_chains(label: str, rows: Sequence[SourcedRow]) -> None:
    """Refuse conditional probabilities p with a gap: AL(k) needs every position up to k."""
    locations = {id(item.row): item.location for item in rows}
    for chain in position_chains(item.row for item in rows):
        for position, row in enumerate(chain, 1):
            if row.k != position:
                raise UserError(
                    f"{locations[id(row)]}: {label}: p of position {position} is missing; AL at k = {row.k} needs p "
                    f"at every position from 1 to {row.k}"
                )


def _check_one_text(label: str, rows: Sequence[SourcedRow]) -> None:
    """Refuse lengths at several depths that break the bound at the head of this file. Maps are of one text anyway."""
    if all(item.row.accepted is not None for item in rows):
        return
    acceptance = acceptance_from(item.row for item in rows)
    depths = acceptance.depths
    units = acceptance.whole_units(depths)
    if not units:
        return
    counts = acceptance.at(depths)
    tokens, rounds = (part.sum(axis=0) for part in counts)
    for i, k in enumerate(depths):
        # Room for three standard deviations and the cut end of each answer, or for rounding.
        num_kept = float(tokens[i] - rounds[i])
        share = (num_kept + 3.0 * math.sqrt(num_kept + 1.0) + len(units)) / float(tokens[i])
        if not acceptance.is_counted:
            share = 1.0 - 1.0 / (float(tokens[i] / rounds[i]) + ROUNDED)
        for j, m in enumerate(depths[i + 1 :], i + 1):
            al = float(tokens[j] / rounds[j])
            if 1.0 - 1.0 / max(1.0, al - ROUNDED) > m * share:
                shallow, deep = (
                    next(item.location for item in rows if _has_acceptance_at(item.row, depth)) for depth in (k, m)
                )
                raise UserError(
                    f"{deep}: {label}: acceptance length {al:.2f} at k = {m} beside {tokens[i] / rounds[i]:.2f} at "
                    f"k = {k} ({shallow}) cannot be of one text, {1.0 / (1.0 - m * share):.2f} could; check both, or "
                    "tell the measurements apart by drafter or workload"
                )


def _has_acceptance_at(row: ImportedRow, depth: int) -> bool:
    """Whether a row holds acceptance at a depth; maps do, and counters of a deeper run."""
    return row.accepted is not None or row.k == depth or (row.num_drafts is not None and (row.k or 0) > depth)


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
