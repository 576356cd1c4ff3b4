"""From the settings of a mix to the rows of its training split, with a sentence for everything that did not fit.

What is too small for its share is never repeated or shrunk around in silence: `too_small` says what happens, and a
sentence says that it did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from components.contract import UserError
from components.data.chat_mixing_rows import Rows
from components.data.chat_mixing_shares import TooSmall, asked_shares, check_names, mixed_bits, take, turns_needed
from components.data.chat_mixing_splits import REASONS, Sides

if TYPE_CHECKING:
    from numpy.typing import NDArray

Strata = Literal["source", "language", "domain"]
Unit = Literal["tokens", "rows"]
Order = Literal["random", "short_first", "easy_first", "by_source", "by_domain"]


@dataclass(frozen=True)
class Chosen:
    """The training split. candidates: [n] rows it could have. rows, turns: [lines] those it has, repeats before each.

    shares: [strata] asked for. why: [rows] an index into REASONS. said: what a reader should know.
    """

    candidates: NDArray[Any]
    rows: NDArray[Any]
    turns: NDArray[Any]
    shares: NDArray[Any]
    why: NDArray[Any]
    said: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The settings of data.mix_chats that say how much of what; see there."""

    strata: Strata
    weights: Mapping[str, float]
    by: Unit
    temperature: float
    caps: Mapping[str, int]
    limit: int | None
    too_small: TooSmall
    max_turns: int

    def unit(self, rows: Rows) -> NDArray[Any]:
        """[rows] what each counts."""
        import numpy

        return rows.tokens if self.by == "tokens" else numpy.ones(len(rows.tokens), dtype=numpy.int64)

    def shares(self, rows: Rows, among: NDArray[Any] | slice, weights: Mapping[str, float]) -> NDArray[Any]:
        """[strata] the shares asked for, where the rows `among` are what there is."""
        names = rows.names[self.strata]
        there = self._sizes(rows, among)
        return asked_shares(names, there, self._caps(rows), weights, self.temperature, self.strata)

    def chosen(self, rows: Rows, keys: NDArray[Any], sides: Sides) -> Chosen:
        """The rows to train on; raises UserError where there are none, or what is refused or repeated too often."""
        import numpy

        judged_on = numpy.zeros(len(keys), dtype=bool)
        for chosen in sides.judged_on.values():
            judged_on[chosen] = True
        candidates = numpy.flatnonzero((sides.why == 0) & ~judged_on)
        shares = self.shares(rows, candidates, self.weights) if len(candidates) else numpy.zeros(0)
        self._refuse_absent(rows, candidates, shares)
        labels, unit, caps = rows.labels[self.strata], self.unit(rows), self._caps(rows)
        limit = float(self.limit or numpy.inf)
        turns = numpy.ones(len(shares), dtype=numpy.int64)
        if self.too_small == "repeat":
            turns = self._turns(rows, candidates, shares, limit)
        taken = take(
            keys[candidates],
            labels[candidates],
            unit[candidates],
            shares,
            caps=caps,
            limit=limit,
            shrink=self.too_small == "shrink",
            turns=turns,
        )
        why = sides.why.copy()
        why[candidates] = taken.why
        train = candidates[taken.rows]
        if not len(train):
            raise UserError(f"chats: nothing is left to train on ({left_out(why)}); give more rows or other settings")
        used = int(unit[train].sum())
        said = [self._sentence(rows, number, candidates, shares, used) for number in taken.short]
        if self.too_small == "refuse" and (said or not taken.full):
            raise UserError(f"limit: {said[0] if said else f'there are only {used} {self.by} of {self.limit}'}")
        if self.limit and not taken.full and not said and self.limit - used > unit[train].max():
            said.append(f"there are {used:,} {self.by} of the {self.limit:,} asked for")
        return Chosen(candidates, train, taken.turns, shares, why, tuple(said))

    def _caps(self, rows: Rows) -> NDArray[Any]:
        import numpy

        names = rows.names[self.strata]
        check_names("caps", self.caps, names, self.strata)
        return numpy.array([self.caps.get(name, numpy.inf) for name in names], dtype=numpy.float64)

    def _sizes(self, rows: Rows, among: NDArray[Any] | slice) -> NDArray[Any]:
        """[strata] tokens or rows of the rows `among`."""
        import numpy

        labels = rows.labels[self.strata]
        return numpy.bincount(labels[among], weights=self.unit(rows)[among], minlength=len(rows.names[self.strata]))

    def _turns(self, rows: Rows, among: NDArray[Any], shares: NDArray[Any], limit: float) -> NDArray[Any]:
        turns = turns_needed(self._sizes(rows, among), shares, self._caps(rows), limit)
        most = int(turns.argmax())
        if turns[most] > self.max_turns:
            raise UserError(
                f"limit: {self.strata} {rows.names[self.strata][most]!r} would be gone through {turns[most]} times "
                f"(max_turns {self.max_turns}); lower its weight or the limit, or raise max_turns"
            )
        return turns

    def _refuse_absent(self, rows: Rows, candidates: NDArray[Any], shares: NDArray[Any]) -> None:
        """A share of nothing can be filled up for, but neither kept nor repeated."""
        if self.too_small == "fill" or not len(candidates):
            return
        for name, share, there in zip(rows.names[self.strata], shares, self._sizes(rows, candidates), strict=True):
            if share > 0 and not there:
                raise UserError(
                    f"weights: {self.strata} {name!r} has no row to train on; weight 0 leaves it out, too_small: fill "
                    "goes on without it"
                )

    def _sentence(self, rows: Rows, number: int, candidates: NDArray[Any], shares: NDArray[Any], used: int) -> str:
        name, there = rows.names[self.strata][number], int(self._sizes(rows, candidates)[number])
        has = f"{self.strata} {name!r} has {there:,} {self.by}, too few for its share of {shares[number]:.1%}"
        if self.too_small == "shrink":
            of = f" of {self.limit:,}" if self.limit else ""
            return f"{has}: the mix ends at {used:,}{of} {self.by} so that the shares hold (too_small: fill goes on)"
        if self.too_small == "repeat":
            return f"{has}: it is gone through again"
        return f"{has}: the others go on without it" if self.too_small == "fill" else has


def line_places(rows: Rows, train: NDArray[Any], turns: NDArray[Any], order: Order, seed: int) -> NDArray[Any]:
    """[lines] which entry of `train` stands on each line; equals in size or kind by a hash of their content."""
    import numpy

    with_turn = rows.row[train] ^ (turns.astype(numpy.uint64) << numpy.uint64(48))
    keys = mixed_bits(with_turn, f"order:{seed}")
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


def left_out(why: NDArray[Any]) -> str:
    """The rows left out by reason, in words."""
    counts = Counter({REASONS[number]: int((why == number).sum()) for number in range(1, len(REASONS))})
    return ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.most_common() if count)
