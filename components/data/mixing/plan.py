"""Selects the training rows of a mix from its settings, with a sentence for every stratum that did not fit.

The setting `too_small` decides what happens to a stratum that has too few rows for its share, and a sentence reports
that it happened: nothing is repeated or left out silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from components.contract import UserError
from components.data.mixing.row_index import Rows
from components.data.mixing.sampling import (
    check_names,
    order_keys,
    passes_needed,
    requested_shares,
    sample_rows,
)
from components.data.mixing.splits import REASONS, Splits
from components.data.settings import Order, Strata, TooSmall, Unit


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
    """The settings of data.mix_chats that decide how much of each stratum is taken; see there."""

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
        notes = [self._sentence(rows, number, candidates, shares, size) for number in sample.short]
        if self.too_small == "refuse" and (notes or not sample.full):
            raise UserError(f"limit: {notes[0] if notes else f'there are only {size} {self.by} of {self.limit}'}")
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
                f"limit: {self.strata} {rows.names[self.strata][longest]!r} would be gone through "
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
