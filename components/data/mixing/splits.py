"""Assigns rows to training or evaluation by hashes, before any shares are applied.

The side of a row depends on its question's hash alone, as in splits.py: the same question under another system
prompt, in another source or with other white space is on the same side, and no limit, weight or further source moves
it. A conversation whose later turn asks a question of the evaluation is not trained on either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from components.data.mixing.row_index import NO_QUESTION, Rows
from components.data.mixing.sampling import LEFT_OUT, sample_rows

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
class Splits:
    """The side of every row.

    reasons: [rows] an index into REASONS; 0 for rows that may be trained on and rows of the evaluation.
    evaluation: evaluation split -> row indices.
    """

    reasons: NDArray[Any]
    evaluation: dict[str, NDArray[Any]]


def assign_splits(
    rows: Rows,
    keys: NDArray[Any],
    quotas: dict[str, int],
    evaluation_percent: int,
    shares: StrataShares,
    ask_once: bool,
) -> Splits:
    """Drop duplicates, select the evaluation rows, and mark which of the others may be trained on.

    keys: [rows] uint64, an order of rows that depends on their content and the seed alone.
    quotas: evaluation split -> most rows. shares: the shares of the strata in the evaluation.
    """
    reasons = numpy.zeros(len(keys), dtype=numpy.uint8)
    reasons[rows.percent == NO_QUESTION] = REASONS.index("no_question")
    _drop_repeats(reasons, "duplicate", rows.row, rows, keys)
    of_evaluation = (rows.percent < evaluation_percent) & (reasons == 0)
    _drop_repeats(reasons, "evaluation_side", rows.question, rows, keys, among=of_evaluation)
    if ask_once:
        _drop_repeats(reasons, "same_prompt", rows.content, rows, keys)
    candidates = numpy.flatnonzero(of_evaluation & (reasons == 0))
    evaluation = _split_evaluation_rows(candidates, keys, quotas, shares)
    reasons[of_evaluation] = REASONS.index("evaluation_side")
    for evaluation_rows in evaluation.values():
        reasons[evaluation_rows] = 0
    evaluation_questions = rows.question[numpy.concatenate([*evaluation.values(), numpy.zeros(0, dtype=numpy.int64)])]
    leaking = rows.later_row[numpy.isin(rows.later_question, evaluation_questions)]
    leaking = leaking[(reasons[leaking] == 0) & ~of_evaluation[leaking]]
    reasons[leaking] = REASONS.index("asks_what_is_judged_on")
    return Splits(reasons, evaluation)


@dataclass(frozen=True)
class StrataShares:
    """Shares of strata. strata: [rows] the stratum of every row. shares: [strata] add up to 1."""

    strata: NDArray[Any]
    shares: NDArray[Any]


def _drop_repeats(
    reasons: NDArray[Any],
    reason: str,
    values: NDArray[Any],
    rows: Rows,
    keys: NDArray[Any],
    among: NDArray[Any] | None = None,
) -> None:
    """Of rows without a reason and with equal `values`, keep the first by key and source; the others get `reason`."""
    inside = numpy.flatnonzero((reasons == 0) if among is None else (reasons == 0) & among)
    by_label = [rows.labels[name][inside] for name in ("domain", "language", "source")]
    order = inside[numpy.lexsort((*by_label, keys[inside], values[inside]))]
    again = numpy.zeros(len(order), dtype=bool)
    again[1:] = values[order][1:] == values[order][:-1]
    reasons[order[again]] = REASONS.index(reason)


def _split_evaluation_rows(
    candidates: NDArray[Any], keys: NDArray[Any], quotas: dict[str, int], shares: StrataShares
) -> dict[str, NDArray[Any]]:
    """Share rows among the evaluation splits, each with the same mix of strata; too few rows are shared by quota."""
    num_strata = len(shares.shares)
    sample = sample_rows(
        keys[candidates],
        shares.strata[candidates],
        numpy.ones(len(candidates)),
        shares.shares,
        caps=numpy.full(num_strata, numpy.inf),
        limit=sum(quotas.values()),
        shrink=False,
        passes=numpy.ones(num_strata, dtype=numpy.int64),
    )
    selected = candidates[sample.rows]
    capacity = _split_capacity(len(selected), quotas)
    total = max(1, sum(capacity.values()))
    num_by_stratum: dict[int, dict[str, int]] = {}
    rows_by_split: dict[str, list[int]] = {split: [] for split in quotas}
    for row, stratum in zip(selected.tolist(), shares.strata[selected].tolist(), strict=True):
        of_stratum = num_by_stratum.setdefault(stratum, dict.fromkeys(quotas, 0))
        position = sum(of_stratum.values()) + 1
        unfilled = [split for split in quotas if len(rows_by_split[split]) < capacity[split]]
        split = max(unfilled, key=lambda name: capacity[name] * position / total - of_stratum[name])
        of_stratum[split] += 1
        rows_by_split[split].append(row)
    return {split: numpy.array(split_rows, dtype=numpy.int64) for split, split_rows in rows_by_split.items()}


def _split_capacity(available: int, quotas: dict[str, int]) -> dict[str, int]:
    """Rows of every split: its quota or, with too few rows, a part in proportion to it and at least one if possible."""
    total = sum(quotas.values())
    if available >= total:
        return dict(quotas)
    capacity = {split: min(1, quota) for split, quota in quotas.items()}
    for split, quota in quotas.items():
        capacity[split] = max(capacity[split], available * quota // total)
    largest = max(quotas, key=lambda split: quotas[split])
    capacity[largest] = max(capacity[largest], capacity[largest] + available - sum(capacity.values()))
    return capacity
