"""Rows that contradict each other: a fact that is given twice, a total beside its parts, lengths that no text has.

Each is refused with an error of one line: the place, the fault and the remedy. What is odd but possible becomes a flag
instead (policy.py).

Acceptance lengths of one text. Rounds at depth k cover the text. One of them covers c kept drafts and a bonus token;
rounds of a deeper m that begin in there keep at most m c drafts between them, wherever they begin. So
    1 - 1 / AL(m) <= m (1 - 1 / AL(k)),    k < m,    where 1 - 1 / AL is the share of tokens that were drafted.
For one set of rounds AL(m) - AL(k) <= m - k holds as well, and AL grows ever less with depth. Runs at different depths
begin their rounds elsewhere and may break both: 2, 1, 0 kept in turn gives AL(1) = 1.5, AL(2) = 3. Those are flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from components.contract import UserError
from components.speedup.imported.acceptance import acceptance_from, position_chains
from components.speedup.imported.evidence import DraftSetting, is_shared, label_of, setting_of
from components.speedup.imported.rows import ImportedRow, SourcedRow
from components.speedup.imported.times import check_times

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
        for text_rows in _by_text(setting_rows):
            _check_one_text(label, text_rows)
    by_setting = _by_setting(item for item in rows if not is_shared(item.row))
    shared = [item for item in rows if is_shared(item.row)]
    for setting, batch_size in {**by_setting, **_by_setting(shared)}:
        shared_rows = [item for item in shared if item.row.batch_size == batch_size]
        check_times(_label(setting, batch_size), by_setting.get((setting, batch_size), []) + shared_rows, setting[2])


def _by_setting(rows: Iterable[SourcedRow]) -> dict[tuple[DraftSetting, int], list[SourcedRow]]:
    """Rows by drafter, setting and batch size."""
    groups: dict[tuple[DraftSetting, int], list[SourcedRow]] = {}
    for item in rows:
        groups.setdefault((setting_of(item.row), item.row.batch_size), []).append(item)
    return groups


def _by_text(rows: Sequence[SourcedRow]) -> list[list[SourcedRow]]:
    """Rows by workload and context length; each group describes one text."""
    groups: dict[tuple[str | None, int | None], list[SourcedRow]] = {}
    for item in rows:
        groups.setdefault((item.row.workload, item.row.kv_len), []).append(item)
    return list(groups.values())


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
