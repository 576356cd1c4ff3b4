"""Selects the rows of a mix: which may be trained or evaluated on, and how many of each source, language or domain.

The side of a row depends on its question's hash alone, as in collect/prompts.py: the same question under another system
prompt, in another source or with other white space is on the same side, and no limit, weight or further source moves
it. A conversation whose later turn asks a question of the evaluation is not trained on either.

Every row gets a level: the sum of the sizes before it in its stratum plus half its own size, divided by the requested
share. Taking rows in the order of their levels keeps to the shares throughout: at level x a stratum has contributed
share * x, to within half a row (the divisor method of Webster and Sainte-Lague, for rows of any size). A limit cuts
that order, so the rows of a smaller limit are among those of a larger one. Within a stratum, rows are ordered by a hash
of their content and the seed: neither the order of the input nor the number of its parts matters.

Without weights the shares are n**(1/T) of the sizes n, as in multilingual pre-training (XLM, arXiv:1901.07291, section
3.1; its alpha is our 1/T), where a size counts up to its cap (T5, arXiv:1910.10683, section 3.5.2).

The setting `too_small` decides what happens to a stratum that has too few rows for its share, and a sentence reports
that it happened: nothing is repeated or left out silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from components.contract import UserError
from components.data.dedup.text_units import mix_bits
from components.data.formats.prompts import hash_number
from components.data.mixing.row_index import NO_QUESTION, Rows
from components.data.settings import FEWEST_TO_LEARN_FROM, Order, Strata, TooSmall, Unit

LEFT_OUT: Final = ("taken", "zero_weight", "over_cap", "beyond_the_shares", "over_the_limit")
"""Why a row is not in the mix: its number in `Sample.reasons`."""


@dataclass(frozen=True)
class Sample:
    """The selected rows, in the order of their levels, and the reason why each other row is left out.

    rows:    [selected] indices of rows; a repeated row appears several times.
    repeats: [selected] how many copies of that row come before.
    reasons: [rows] an index into LEFT_OUT.
    short:   numbers of the strata with too few rows: they end the mix (shrink), or the others make up for them.
    full:    whether the limit ended the mix.
    """

    rows: NDArray[Any]
    repeats: NDArray[Any]
    reasons: NDArray[Any]
    short: tuple[int, ...]
    full: bool


def requested_shares(
    names: Sequence[str],
    sizes: NDArray[Any],
    caps: NDArray[Any],
    weights: Mapping[str, float],
    temperature: float,
    strata: str,
) -> NDArray[Any]:
    """[strata] shares that add up to 1: the weights or, without any, sizes**(1/temperature).

    sizes: [strata] available tokens or rows. caps: [strata] the most to take of each, infinity for no cap.

    Raises:
        UserError: a weight names a stratum without rows, a stratum has no weight, or no weight is above 0.
    """
    if weights:
        check_names("weights", weights, names, strata)
        if unnamed := [name for name in names if name not in weights]:
            raise UserError(f"weights: no weight for {strata} {_name_list(unnamed)}; give one (0 leaves it out)")
        shares = numpy.array([weights[name] for name in names], dtype=numpy.float64)
    else:
        shares = numpy.minimum(sizes, caps).astype(numpy.float64) ** (1.0 / temperature)
    if not shares.sum() > 0:
        raise UserError(f"weights: nothing has a weight above 0; there are {strata} {_name_list(names)}")
    return numpy.asarray(shares / shares.sum())


def check_names(setting: str, named: Mapping[str, float], names: Sequence[str], strata: str) -> None:
    """Raise UserError where a setting names a stratum that no row belongs to."""
    for name in named:
        if name not in names:
            raise UserError(f"{setting}: there is no row of {strata} {name!r}; there are {_name_list(names)}")


def passes_needed(sizes: NDArray[Any], shares: NDArray[Any], caps: NDArray[Any], limit: float) -> NDArray[Any]:
    """[strata] how many passes over each stratum reach the limit while keeping to the shares."""
    level = limit
    for _ in shares:  # every pass finds at least one more stratum that its cap ends
        reached_sizes = numpy.minimum(caps, shares * level)
        open_ = (shares > 0) & (shares * level < caps)
        if not open_.any():
            break
        level += max(0.0, limit - float(reached_sizes.sum())) / float(shares[open_].sum())
    final_sizes = numpy.minimum(caps, shares * level)
    return numpy.maximum(1, numpy.ceil(final_sizes / numpy.maximum(sizes, 1e-9) - 1e-9)).astype(numpy.int64)


def sample_rows(
    keys: NDArray[Any],
    strata: NDArray[Any],
    sizes: NDArray[Any],
    shares: NDArray[Any],
    *,
    caps: NDArray[Any],
    limit: float,
    shrink: bool,
    passes: NDArray[Any],
) -> Sample:
    """Select the rows of a mix with these shares.

    keys: [rows] uint64, distinct: the order within a stratum. strata: [rows] the stratum's number. sizes: [rows].
    shares: [strata] add up to 1. caps: [strata], limit: in the unit of sizes; infinity for none.
    shrink: end where the first stratum is exhausted, so that the shares hold; otherwise the others go on.
    passes: [strata] how often a stratum may be gone through.
    """
    order = numpy.lexsort((keys, strata))
    of, sorted_sizes = strata[order], sizes[order].astype(numpy.float64)
    totals = numpy.bincount(of, weights=sorted_sizes, minlength=len(shares))
    first = numpy.concatenate([[0.0], numpy.cumsum(totals)])[:-1]
    start = numpy.cumsum(sorted_sizes) - sorted_sizes - first[of]
    rows, repeat = order, numpy.zeros(len(order), dtype=numpy.int64)
    for number in range(1, int(passes.max(initial=1))):
        again = passes[of] > number
        rows = numpy.concatenate([rows, order[again]])
        repeat = numpy.concatenate([repeat, numpy.full(again.sum(), number)])
        start = numpy.concatenate([start, number * totals[of[again]] + start[: len(order)][again]])
    group, size = strata[rows], sizes[rows].astype(numpy.float64)
    weighted = shares[group] > 0
    level = (start + size / 2) / numpy.where(weighted, shares[group], 1.0)
    capped = start + size > caps[group]
    supply = totals * passes
    ends = numpy.where((shares > 0) & (supply <= caps), supply / numpy.where(shares > 0, shares, 1.0), numpy.inf)
    end = float(ends.min(initial=numpy.inf)) if shrink else numpy.inf
    beyond = level > end
    candidates = numpy.flatnonzero(weighted & ~capped & ~beyond)
    candidates = candidates[numpy.lexsort((keys[rows[candidates]], repeat[candidates], level[candidates]))]
    fits = numpy.cumsum(size[candidates]) <= limit * (1 + 1e-12)
    selected = candidates[fits]
    reasons = numpy.zeros(len(keys), dtype=numpy.uint8)
    for reason, entries in ((3, beyond), (2, capped), (1, ~weighted)):
        reasons[rows[entries & (repeat == 0)]] = reason
    cut = candidates[~fits]
    reasons[rows[cut[repeat[cut] == 0]]] = 4
    full = len(cut) > 0
    last_level = float(level[selected].max(initial=0.0))
    short: NDArray[Any] = numpy.zeros(0, dtype=numpy.int64)
    if passes.max(initial=1) > 1:
        short = numpy.unique(group[selected][repeat[selected] > 0])
    elif not shrink:
        short = numpy.flatnonzero(ends < last_level)
    elif not full and (beyond & weighted & ~capped).any():
        short = numpy.flatnonzero(ends == end)
    return Sample(rows[selected], repeat[selected], reasons, tuple(int(number) for number in short), full)


def order_keys(values: NDArray[Any], salt: str) -> NDArray[Any]:
    """[rows] uint64, a bijection of uint64 `values` that looks random and depends on `salt` (splitmix64's finaliser).

    Distinct ids stay distinct, so that an order by these numbers has no ties.
    """
    return mix_bits(values ^ numpy.uint64(hash_number(f"mix chats:{salt}")))


def _name_list(names: Sequence[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:8])
    return f"{listed} and {len(names) - 8} more" if len(names) > 8 else listed


EVALUATION: Final = ("test", "warm_up", "validation")
REASONS: Final = (*LEFT_OUT, "duplicate", "no_question", "same_prompt", "evaluation_side", "asks_what_is_judged_on")
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
    strata: NDArray[Any],
    shares: NDArray[Any],
    ask_once: bool,
) -> Splits:
    """Drop duplicates, select the evaluation rows, and mark which of the others may be trained on.

    keys: [rows] uint64, an order of rows that depends on their content and the seed alone.
    quotas: evaluation split -> most rows. strata: [rows] the stratum of each. shares: [strata] in the evaluation.
    """
    reasons = numpy.zeros(len(keys), dtype=numpy.uint8)
    reasons[rows.percent == NO_QUESTION] = REASONS.index("no_question")
    _drop_repeats(reasons, "duplicate", rows.row, rows, keys)
    of_evaluation = (rows.percent < evaluation_percent) & (reasons == 0)
    _drop_repeats(reasons, "evaluation_side", rows.question, rows, keys, among=of_evaluation)
    if ask_once:
        _drop_repeats(reasons, "same_prompt", rows.content, rows, keys)
    candidates = numpy.flatnonzero(of_evaluation & (reasons == 0))
    evaluation = _split_evaluation_rows(candidates, keys, quotas, strata, shares)
    reasons[of_evaluation] = REASONS.index("evaluation_side")
    for evaluation_rows in evaluation.values():
        reasons[evaluation_rows] = 0
    evaluation_questions = rows.question[numpy.concatenate([*evaluation.values(), numpy.zeros(0, dtype=numpy.int64)])]
    leaking = rows.later_row[numpy.isin(rows.later_question, evaluation_questions)]
    leaking = leaking[(reasons[leaking] == 0) & ~of_evaluation[leaking]]
    reasons[leaking] = REASONS.index("asks_what_is_judged_on")
    return Splits(reasons, evaluation)


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
    candidates: NDArray[Any], keys: NDArray[Any], quotas: dict[str, int], strata: NDArray[Any], shares: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """Share rows among the evaluation splits, each with the same mix of strata; too few rows are shared by quota."""
    sample = sample_rows(
        keys[candidates],
        strata[candidates],
        numpy.ones(len(candidates)),
        shares,
        caps=numpy.full(len(shares), numpy.inf),
        limit=sum(quotas.values()),
        shrink=False,
        passes=numpy.ones(len(shares), dtype=numpy.int64),
    )
    selected = candidates[sample.rows]
    capacity = _split_capacity(len(selected), quotas)
    total = max(1, sum(capacity.values()))
    num_by_stratum: dict[int, dict[str, int]] = {}
    rows_by_split: dict[str, list[int]] = {split: [] for split in quotas}
    for row, stratum in zip(selected.tolist(), strata[selected].tolist(), strict=True):
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


@dataclass(frozen=True)
class TrainingSplit:
    """The rows to train on.

    candidates: [n] rows that may be trained on. rows[i]: row index of training line i. repeats[i]: how many copies of
    that row precede line i. shares: [strata] requested. reasons: [rows] an index into REASONS. notes: sentences for
    the reader of the run.
    """

    candidates: NDArray[Any]
    rows: NDArray[Any]
    repeats: NDArray[Any]
    shares: NDArray[Any]
    reasons: NDArray[Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The settings of data.mix_chats that decide how much of each stratum is taken; see there.

    limit: `limit_tokens` or `limit_rows`, in the unit of `by`.
    """

    strata: Strata
    weights: Mapping[str, float]
    by: Unit
    temperature: float
    caps: Mapping[str, int]
    limit: int | None
    too_small: TooSmall
    max_turns: int

    def unit(self, rows: Rows) -> NDArray[Any]:
        """[rows] the size of each row: its tokens, or 1 where shares are by rows."""
        return rows.tokens if self.by == "tokens" else numpy.ones(len(rows.tokens), dtype=numpy.int64)

    def shares(self, rows: Rows, among: NDArray[Any] | slice, weights: Mapping[str, float]) -> NDArray[Any]:
        """[strata] the requested shares, when only the rows `among` are available."""
        names = rows.names[self.strata]
        sizes = self._sizes(rows, among)
        return requested_shares(names, sizes, self._caps(rows), weights, self.temperature, self.strata)

    def select_rows(self, rows: Rows, keys: NDArray[Any], splits: Splits) -> TrainingSplit:
        """Select the rows to train on; raises UserError where none is left, or `too_small` refuses the mix."""
        for_evaluation = numpy.zeros(len(keys), dtype=bool)
        for evaluation_rows in splits.evaluation.values():
            for_evaluation[evaluation_rows] = True
        candidates = numpy.flatnonzero((splits.reasons == 0) & ~for_evaluation)
        shares = self.shares(rows, candidates, self.weights) if len(candidates) else numpy.zeros(0)
        self._refuse_absent(rows, candidates, shares)
        labels, unit, caps = rows.labels[self.strata], self.unit(rows), self._caps(rows)
        limit = float(self.limit or numpy.inf)
        passes = numpy.ones(len(shares), dtype=numpy.int64)
        if self.too_small == "repeat":
            passes = self._num_passes(rows, candidates, shares, limit)
        sample = sample_rows(
            keys[candidates],
            labels[candidates],
            unit[candidates],
            shares,
            caps=caps,
            limit=limit,
            shrink=self.too_small == "shrink",
            passes=passes,
        )
        reasons = splits.reasons.copy()
        reasons[candidates] = sample.reasons
        train = candidates[sample.rows]
        if not len(train):
            raise UserError(
                f"chats: nothing is left to train on ({reasons_text(reasons)}); give more rows or other settings"
            )
        size = int(unit[train].sum())
        if sample.full and len(train) < FEWEST_TO_LEARN_FROM:
            raise UserError(
                f"limit_{self.by}: {self.limit:,} {self.by} are {len(train)} conversations to train on, and a drafter"
                f" needs {FEWEST_TO_LEARN_FROM} at least; raise it, or leave it out"
            )
        notes = [self._sentence(rows, number, candidates, shares, size) for number in sample.short]
        if self.too_small == "refuse" and (notes or not sample.full):
            raise UserError(
                f"limit_{self.by}: {notes[0] if notes else f'there are only {size} {self.by} of {self.limit}'}"
            )
        if self.limit and not sample.full and not notes and self.limit - size > unit[train].max():
            notes.append(f"there are {size:,} {self.by} of the {self.limit:,} asked for")
        return TrainingSplit(candidates, train, sample.repeats, shares, reasons, tuple(notes))

    def _caps(self, rows: Rows) -> NDArray[Any]:
        names = rows.names[self.strata]
        check_names("caps", self.caps, names, self.strata)
        return numpy.array([self.caps.get(name, numpy.inf) for name in names], dtype=numpy.float64)

    def _sizes(self, rows: Rows, among: NDArray[Any] | slice) -> NDArray[Any]:
        """[strata] tokens or rows of the rows `among`."""
        labels = rows.labels[self.strata]
        return numpy.bincount(labels[among], weights=self.unit(rows)[among], minlength=len(rows.names[self.strata]))

    def _num_passes(self, rows: Rows, among: NDArray[Any], shares: NDArray[Any], limit: float) -> NDArray[Any]:
        passes = passes_needed(self._sizes(rows, among), shares, self._caps(rows), limit)
        longest = int(passes.argmax())
        if passes[longest] > self.max_turns:
            raise UserError(
                f"limit_{self.by}: {self.strata} {rows.names[self.strata][longest]!r} would be gone through "
                f"{passes[longest]} times (max_turns {self.max_turns}); lower its weight or the limit, "
                "or raise max_turns"
            )
        return passes

    def _refuse_absent(self, rows: Rows, candidates: NDArray[Any], shares: NDArray[Any]) -> None:
        """Raise UserError where a stratum with a share has no rows, unless the others may fill up for it."""
        if self.too_small == "fill" or not len(candidates):
            return
        for name, share, size in zip(rows.names[self.strata], shares, self._sizes(rows, candidates), strict=True):
            if share > 0 and not size:
                raise UserError(
                    f"weights: {self.strata} {name!r} has no row to train on; weight 0 leaves it out, too_small: fill "
                    "goes on without it"
                )

    def _sentence(self, rows: Rows, number: int, candidates: NDArray[Any], shares: NDArray[Any], used: int) -> str:
        name, available = rows.names[self.strata][number], int(self._sizes(rows, candidates)[number])
        has = f"{self.strata} {name!r} has {available:,} {self.by}, too few for its share of {shares[number]:.1%}"
        if self.too_small == "shrink":
            of = f" of {self.limit:,}" if self.limit else ""
            return f"{has}: the mix ends at {used:,}{of} {self.by} so that the shares hold (too_small: fill goes on)"
        if self.too_small == "repeat":
            return f"{has}: it is gone through again"
        return f"{has}: the others go on without it" if self.too_small == "fill" else has


def line_order(rows: Rows, train: NDArray[Any], repeats: NDArray[Any], order: Order, seed: int) -> NDArray[Any]:
    """[lines] the index into `train` of each line; rows of equal rank are ordered by a hash of their content."""
    with_repeat = rows.row[train] ^ (repeats.astype(numpy.uint64) << numpy.uint64(48))
    keys = order_keys(with_repeat, f"order:{seed}")
    if order == "random":
        return numpy.argsort(keys, kind="stable")
    characters, source = rows.characters[train], rows.labels["source"][train]
    if order == "short_first":
        return numpy.lexsort((keys, characters))
    if order == "by_source":
        return numpy.lexsort((keys, source))
    if order == "by_domain":
        return numpy.lexsort((keys, rows.labels["domain"][train]))
    by_size = numpy.lexsort((keys, characters, source))
    counts = numpy.bincount(source, minlength=len(rows.names["source"]))
    begins = numpy.concatenate([[0], numpy.cumsum(counts)])[:-1]
    quantile = numpy.empty(len(train))
    quantile[by_size] = (numpy.arange(len(train)) - begins[source[by_size]] + 0.5) / counts[source[by_size]]
    return numpy.lexsort((keys, quantile))


def reasons_text(reasons: NDArray[Any]) -> str:
    """How many rows were left out for each reason, as text."""
    counts = Counter({REASONS[number]: int((reasons == number).sum()) for number in range(1, len(REASONS))})
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.most_common() if count)
