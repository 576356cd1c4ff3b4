"""What rows cannot say together: facts told twice, a total beside its parts, lengths that no one text has.

Each is refused in one line that says where, what, and how to mend it. What may be true all the same is a flag instead
(outside_doubts.py).

Lengths of one text. Rounds at depth k cover the text. Within what one of them covers, c kept drafts and a bonus token,
rounds of a deeper m begin that keep at most m c drafts between them, wherever they begin. So
    1 - 1 / AL(m) <= m (1 - 1 / AL(k)),    k < m,    where 1 - 1 / AL is the share of tokens that were drafted.
Of one set of rounds, AL(m) - AL(k) <= m - k and steps that only shrink hold as well. Runs of different depths begin
their rounds elsewhere and may break both: 2, 1, 0 kept in turn gives AL(1) = 1.5 and AL(2) = 3. Those are flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from components.contract import UserError
from components.speedup.outside_acceptance import acceptance_from, position_chains
from components.speedup.outside_evidence import DraftSetting, is_shared, label_of, setting_of
from components.speedup.outside_rows import OutsideRow, Placed
from components.speedup.outside_times import check_times

ROUNDED = 0.05  # how far a length that is printed with one decimal may lie from what it was

BY_DEPTH = "by depth"


def check_together(placed: Sequence[Placed]) -> None:
    """Refuse rows that contradict each other.

    Raises:
        UserError: the first contradiction, in one line.
    """
    _told_once(placed)
    for (setting, batch_size), mine in _grouped(p for p in placed if p.row.tells_acceptance).items():
        of = _name(setting, batch_size)
        _parts_or_total(of, mine)
        _whole_chains(of, mine)
        for alike in _apart(mine):
            _one_text(of, alike)
    own, shared = _grouped(p for p in placed if not is_shared(p.row)), _grouped(p for p in placed if is_shared(p.row))
    for setting, batch_size in {**own, **shared}:
        rows = own.get((setting, batch_size), [])
        rows = rows + [p for (_, size), of_all in shared.items() if size == batch_size for p in of_all]
        check_times(_name(setting, batch_size), rows, setting[2])


def _grouped(placed: Iterable[Placed]) -> dict[tuple[DraftSetting, int], list[Placed]]:
    """Rows by drafter, setting and batch size."""
    found: dict[tuple[DraftSetting, int], list[Placed]] = {}
    for p in placed:
        found.setdefault((setting_of(p.row), p.row.batch_size), []).append(p)
    return found


def _apart(placed: Sequence[Placed]) -> list[list[Placed]]:
    """Rows by workload and context length: each is to be of one text."""
    found: dict[tuple[str | None, int | None], list[Placed]] = {}
    for p in placed:
        found.setdefault((p.row.workload, p.row.kv_len), []).append(p)
    return list(found.values())


def _name(setting: DraftSetting, batch_size: int) -> str:
    return f"{label_of(setting)}, batch {batch_size}"


def _told_once(placed: Sequence[Placed]) -> None:
    """No fact is told twice, unless `rep` or `block` numbers it. A figure for all prompts may be repeated as it is."""
    first: dict[tuple[object, ...], tuple[Placed, object]] = {}
    for p in placed:
        row = p.row
        belongs = (setting_of(row), row.workload, row.batch_size, row.kv_len, row.prompt, row.rep, row.block)
        for name, at, value in _facts(row):
            before, told = first.setdefault((name, at, *belongs), (p, value))
            may_repeat = value == BY_DEPTH or (row.prompt is None and not row.is_counted)
            if before is p or (may_repeat and told == value):
                continue
            whose = label_of(setting_of(row)) if row.prompt is None else f"prompt {row.prompt}"
            depth = "" if at is None else f" at k = {at}"
            raise UserError(
                f"{p.where}: {name} of {whose}{depth} was already told ({before.where}); number repetitions in a "
                "column rep, or tell cases apart by prompt, workload, drafter, batch_size or kv_len"
            )


def _facts(row: OutsideRow) -> list[tuple[str, int | None, object]]:
    """What a row tells that may be told once: its name, the depth, the value."""
    facts: list[tuple[str, int | None, object]] = []
    if row.speedup is not None:
        facts.append(("speedup", row.k, row.speedup))
    if row.tpot is not None:
        facts.append(("tpot", row.k, row.tpot))
    if row.tells_acceptance and row.accepted is None:
        positions = tuple(row.accepted_per_pos or ())
        facts.append(("acceptance", row.k, (row.al, row.p, row.tokens, row.rounds, row.num_drafts, positions)))
    if row.tells_acceptance:
        # Beside a map, which tells every depth, there is nothing else to tell.
        facts.append(("acceptance", None, BY_DEPTH if row.accepted is None else tuple(row.accepted)))
    return facts


def _parts_or_total(of: str, placed: Sequence[Placed]) -> None:
    """Prompts, workloads and weights are told by all rows of a drafter or by none: parts and a total do not add up."""
    for name in ("workload", "prompt"):
        without = next((p for p in placed if getattr(p.row, name) is None), None)
        with_it = next((p for p in placed if getattr(p.row, name) is not None), None)
        if without is not None and with_it is not None:
            raise UserError(
                f"{without.where}: {of}: acceptance names no {name}, at {with_it.where} it does; a total beside its "
                f"parts would count twice: give one of them, or name the {name} in every row"
            )
    bare = next((p for p in placed if not p.row.is_counted), None)
    counted = next((p for p in placed if p.row.is_counted), None)
    if bare is not None and counted is not None and len({(p.row.workload, p.row.prompt) for p in placed}) > 1:
        raise UserError(
            f"{bare.where}: {of}: a length without tokens or rounds cannot be weighed against the counts at "
            f"{counted.where}; give tokens or rounds beside it"
        )


def _whole_chains(of: str, placed: Sequence[Placed]) -> None:
    """p is conditional, so that AL(k) needs every position up to k."""
    where = {id(p.row): p.where for p in placed}
    for chain in position_chains(p.row for p in placed):
        for position, row in enumerate(chain, 1):
            if row.k != position:
                raise UserError(
                    f"{where[id(row)]}: {of}: p of position {position} is missing; AL at k = {row.k} needs p at every "
                    f"position from 1 to {row.k}"
                )


def _one_text(of: str, placed: Sequence[Placed]) -> None:
    """Lengths at several depths could be of one text: the bound at the head of this file. Maps are of one."""
    if all(p.row.accepted is not None for p in placed):
        return
    found = acceptance_from(p.row for p in placed)
    depths = found.depths
    units = found.whole_units(depths)
    if not units:
        return
    counts = found.at(depths)
    tokens, rounds = (part.sum(axis=0) for part in counts)
    for i, k in enumerate(depths):
        # Room for three standard deviations and the cut end of each answer, or for rounding.
        kept = float(tokens[i] - rounds[i])
        share = (kept + 3.0 * math.sqrt(kept + 1.0) + len(units)) / float(tokens[i])
        if not found.is_counted:
            share = 1.0 - 1.0 / (float(tokens[i] / rounds[i]) + ROUNDED)
        for j, m in enumerate(depths[i + 1 :], i + 1):
            al = float(tokens[j] / rounds[j])
            if 1.0 - 1.0 / max(1.0, al - ROUNDED) > m * share:
                at = {depth: next(p.where for p in placed if _tells(p.row, depth)) for depth in (k, m)}
                raise UserError(
                    f"{at[m]}: {of}: acceptance length {al:.2f} at k = {m} beside {tokens[i] / rounds[i]:.2f} at k = "
                    f"{k} ({at[k]}) cannot be of one text, {1.0 / (1.0 - m * share):.2f} could; check both, or tell "
                    "the measurements apart by drafter or workload"
                )


def _tells(row: OutsideRow, depth: int) -> bool:
    """Whether a row tells acceptance at a depth; counters of a deeper run do, and maps."""
    return row.accepted is not None or row.k == depth or (row.num_drafts is not None and (row.k or 0) > depth)
