"""Which rows a drafter may be judged on, and which it may be trained on: decided by hashes before anything is weighed.

The side of a row is its question's hash alone, as in choosing.py: the same question under another system prompt, in
another source or white space is on the same side, and no limit, weight or further source moves it. A conversation that
asks in a later turn what evaluation asks is not trained on either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from components.data.chat_mixing_rows import NO_QUESTION, Rows
from components.data.chat_mixing_shares import LEFT_OUT, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

EVALUATION: Final = ("test", "warm_up", "validation")
REASONS: Final = (
    *LEFT_OUT,
    "duplicate",
    "no_question",
    "same_prompt",
    "evaluation_side",
    "asks_what_is_judged_on",
)
"""Why a row is left out, by its number.

zero_weight: its stratum has weight 0. over_cap: its stratum has reached its cap. beyond_the_shares: more of its stratum
would break the shares, since another one has too little. over_the_limit: the mix is as large as asked for.
duplicate: the same conversation stands elsewhere. no_question: no user asks anything. same_prompt: another conversation
begins with the same prompt. evaluation_side: its question may only be judged on, and there are enough of those.
asks_what_is_judged_on: a later turn asks what test, warm-up or validation ask.
"""


@dataclass(frozen=True)
class Sides:
    """why: [rows] an index into REASONS, 0 for what may be trained on or is judged on. judged_on: split -> rows."""

    why: NDArray[Any]
    judged_on: dict[str, NDArray[Any]]


def deal_sides(
    rows: Rows, keys: NDArray[Any], wanted: dict[str, int], evaluation_percent: int, shares: Shares, ask_once: bool
) -> Sides:
    """Set duplicates apart, choose what is judged on, and say what is left to train on.

    keys: [rows] uint64, an order of rows that depends on their content and the seed alone.
    wanted: evaluation split -> rows at most. shares: candidates -> (strata, shares of the evaluation).
    """
    import numpy

    why = numpy.zeros(len(keys), dtype=numpy.uint8)
    why[rows.percent == NO_QUESTION] = REASONS.index("no_question")
    _drop_repeats(why, "duplicate", rows.row, rows, keys)
    of_evaluation = (rows.percent < evaluation_percent) & (why == 0)
    _drop_repeats(why, "evaluation_side", rows.question, rows, keys, among=of_evaluation)
    if ask_once:
        _drop_repeats(why, "same_prompt", rows.content, rows, keys)
    candidates = numpy.flatnonzero(of_evaluation & (why == 0))
    judged_on = _deal(candidates, keys, wanted, shares)
    why[of_evaluation] = REASONS.index("evaluation_side")
    for chosen in judged_on.values():
        why[chosen] = 0
    asked = rows.question[numpy.concatenate([*judged_on.values(), numpy.zeros(0, dtype=numpy.int64)])]
    leaking = rows.later_row[numpy.isin(rows.later_question, asked)]
    leaking = leaking[(why[leaking] == 0) & ~of_evaluation[leaking]]
    why[leaking] = REASONS.index("asks_what_is_judged_on")
    return Sides(why, judged_on)


@dataclass(frozen=True)
class Shares:
    """strata: [rows] the stratum of every row. shares: [strata] of the evaluation."""

    strata: NDArray[Any]
    shares: NDArray[Any]


def _drop_repeats(
    why: NDArray[Any],
    reason: str,
    what: NDArray[Any],
    rows: Rows,
    keys: NDArray[Any],
    among: NDArray[Any] | None = None,
) -> None:
    """Keep one row of those that are still in and equal in `what`: the first by key, then by source."""
    import numpy

    inside = numpy.flatnonzero((why == 0) if among is None else (why == 0) & among)
    labels = rows.labels
    order = inside[
        numpy.lexsort(
            (labels["domain"][inside], labels["language"][inside], labels["source"][inside], keys[inside], what[inside])
        )
    ]
    again = numpy.zeros(len(order), dtype=bool)
    again[1:] = what[order][1:] == what[order][:-1]
    why[order[again]] = REASONS.index(reason)


def _deal(
    candidates: NDArray[Any], keys: NDArray[Any], wanted: dict[str, int], shares: Shares
) -> dict[str, NDArray[Any]]:
    """Share rows among the evaluation splits, each a like mix of the strata; where they are too few, by need."""
    import numpy

    num_strata = len(shares.shares)
    taken = take(
        keys[candidates],
        shares.strata[candidates],
        numpy.ones(len(candidates)),
        shares.shares,
        caps=numpy.full(num_strata, numpy.inf),
        limit=sum(wanted.values()),
        shrink=False,
        turns=numpy.ones(num_strata, dtype=numpy.int64),
    )
    chosen = candidates[taken.rows]
    room = _room(len(chosen), wanted)
    total = max(1, sum(room.values()))
    got: dict[int, dict[str, int]] = {}
    dealt: dict[str, list[int]] = {split: [] for split in wanted}
    for row, stratum in zip(chosen.tolist(), shares.strata[chosen].tolist(), strict=True):
        of_stratum = got.setdefault(stratum, dict.fromkeys(wanted, 0))
        seen = sum(of_stratum.values()) + 1
        open_ = [split for split in wanted if len(dealt[split]) < room[split]]
        split = max(open_, key=lambda one: room[one] * seen / total - of_stratum[one])
        of_stratum[split] += 1
        dealt[split].append(row)
    return {split: numpy.array(found, dtype=numpy.int64) for split, found in dealt.items()}


def _room(there: int, wanted: dict[str, int]) -> dict[str, int]:
    """Rows for every split: as many as wanted or, where there are too few, by need, one for each while they last."""
    total = sum(wanted.values())
    if there >= total:
        return dict(wanted)
    room = {split: min(1, need) for split, need in wanted.items()}
    for split, need in wanted.items():
        room[split] = max(room[split], there * need // total)
    largest = max(wanted, key=lambda split: wanted[split])
    room[largest] = max(room[largest], room[largest] + there - sum(room.values()))
    return room
