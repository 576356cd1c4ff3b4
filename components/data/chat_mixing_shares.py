"""Which rows make up a mix: shares of strata (sources, languages or domains) turned into one order over all rows.

Every row gets a level: the sum of the sizes before it in its stratum, half its own included, divided by the share asked
for. Taking rows in the order of their levels keeps to the shares all along: at level x a stratum has given share * x,
to within half a row (the divisor method of Webster and Sainte-Lague, for rows of any size). A limit cuts that order, so
the rows of a smaller limit are among those of a larger one. Within a stratum rows come by a hash of their content and
the seed: neither the order of the input nor the number of its parts matters.

Without weights the shares are n**(1/T) of the sizes n, as in multilingual pre-training (XLM, arXiv:1901.07291, section
3.1; its alpha is our 1/T), where a size counts up to its cap (T5, arXiv:1910.10683, section 3.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from components.contract import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

TooSmall = Literal["shrink", "fill", "repeat", "refuse"]
LEFT_OUT: Final = ("taken", "zero_weight", "over_cap", "beyond_the_shares", "over_the_limit")
"""Why a row is not in the mix: its number in `Taken.why`."""


@dataclass(frozen=True)
class Taken:
    """Which rows are taken, in the order of their levels, and why the others are not.

    rows:   [taken] indices of rows; a repeated one stands several times. turns: [taken] how often it came before.
    why:    [rows] an index into LEFT_OUT.
    short:  numbers of the strata that have too little: they end the mix (shrink) or are filled up for.
    full:   whether the limit ended the mix.
    """

    rows: NDArray[Any]
    turns: NDArray[Any]
    why: NDArray[Any]
    short: tuple[int, ...]
    full: bool


def asked_shares(
    names: Sequence[str],
    sizes: NDArray[Any],
    caps: NDArray[Any],
    weights: Mapping[str, float],
    temperature: float,
    strata: str,
) -> NDArray[Any]:
    """[strata] shares that add up to 1: the weights or, without any, sizes**(1/temperature).

    sizes: [strata] what is there, tokens or rows. caps: [strata] at most this much, infinity for none.

    Raises:
        UserError: a weight for what is not there, none for what is, or nothing with a weight above 0.
    """
    import numpy

    if weights:
        check_names("weights", weights, names, strata)
        if unnamed := [name for name in names if name not in weights]:
            raise UserError(f"weights: no weight for {strata} {_listed(unnamed)}; give one (0 leaves it out)")
        shares = numpy.array([weights[name] for name in names], dtype=numpy.float64)
    else:
        shares = numpy.minimum(sizes, caps).astype(numpy.float64) ** (1.0 / temperature)
    if not shares.sum() > 0:
        raise UserError(f"weights: nothing has a weight above 0; there are {strata} {_listed(names)}")
    return numpy.asarray(shares / shares.sum())


def check_names(setting: str, given: Mapping[str, Any], names: Sequence[str], strata: str) -> None:
    """Raise UserError where a setting names a stratum that no row belongs to."""
    for name in given:
        if name not in names:
            raise UserError(f"{setting}: there is no row of {strata} {name!r}; there are {_listed(names)}")


def turns_needed(sizes: NDArray[Any], shares: NDArray[Any], caps: NDArray[Any], limit: float) -> NDArray[Any]:
    """[strata] how often each has to be gone through so that the limit is reached without leaving the shares."""
    import numpy

    level = limit
    for _ in shares:  # every pass finds at least one more stratum that its cap ends
        given = numpy.minimum(caps, shares * level)
        open_ = (shares > 0) & (shares * level < caps)
        if not open_.any():
            break
        level += max(0.0, limit - float(given.sum())) / float(shares[open_].sum())
    wanted = numpy.minimum(caps, shares * level)
    return numpy.maximum(1, numpy.ceil(wanted / numpy.maximum(sizes, 1e-9) - 1e-9)).astype(numpy.int64)


def take(
    keys: NDArray[Any],
    strata: NDArray[Any],
    sizes: NDArray[Any],
    shares: NDArray[Any],
    *,
    caps: NDArray[Any],
    limit: float,
    shrink: bool,
    turns: NDArray[Any],
) -> Taken:
    """The rows that make up a mix with these shares.

    keys: [rows] uint64, distinct: the order within a stratum. strata: [rows] the stratum's number. sizes: [rows].
    shares: [strata] add up to 1. caps: [strata], limit: in the unit of sizes; infinity for none.
    shrink: end where the first stratum ends, so that the shares hold; otherwise the others go on.
    turns: [strata] how often a stratum may be gone through.
    """
    import numpy

    order = numpy.lexsort((keys, strata))
    of, own = strata[order], sizes[order].astype(numpy.float64)
    totals = numpy.bincount(of, weights=own, minlength=len(shares))
    first = numpy.concatenate([[0.0], numpy.cumsum(totals)])[:-1]
    start = numpy.cumsum(own) - own - first[of]
    rows, turn = order, numpy.zeros(len(order), dtype=numpy.int64)
    for number in range(1, int(turns.max(initial=1))):
        again = turns[of] > number
        rows, turn = numpy.concatenate([rows, order[again]]), numpy.concatenate([turn, numpy.full(again.sum(), number)])
        start = numpy.concatenate([start, number * totals[of[again]] + start[: len(order)][again]])
    group, size = strata[rows], sizes[rows].astype(numpy.float64)
    weighted = shares[group] > 0
    level = (start + size / 2) / numpy.where(weighted, shares[group], 1.0)
    capped = start + size > caps[group]
    supply = totals * turns
    ends = numpy.where((shares > 0) & (supply <= caps), supply / numpy.where(shares > 0, shares, 1.0), numpy.inf)
    end = float(ends.min(initial=numpy.inf)) if shrink else numpy.inf
    beyond = level > end
    candidates = numpy.flatnonzero(weighted & ~capped & ~beyond)
    candidates = candidates[numpy.lexsort((keys[rows[candidates]], turn[candidates], level[candidates]))]
    fits = numpy.cumsum(size[candidates]) <= limit * (1 + 1e-12)
    chosen = candidates[fits]
    why = numpy.zeros(len(keys), dtype=numpy.uint8)
    for reason, entries in ((3, beyond), (2, capped), (1, ~weighted)):
        why[rows[entries & (turn == 0)]] = reason
    cut = candidates[~fits]
    why[rows[cut[turn[cut] == 0]]] = 4
    full = len(cut) > 0
    reached = float(level[chosen].max(initial=0.0))
    short: NDArray[Any] = numpy.zeros(0, dtype=numpy.int64)
    if turns.max(initial=1) > 1:
        short = numpy.unique(group[chosen][turn[chosen] > 0])
    elif not shrink:
        short = numpy.flatnonzero(ends < reached)
    elif not full and (beyond & weighted & ~capped).any():
        short = numpy.flatnonzero(ends == end)
    return Taken(rows[chosen], turn[chosen], why, tuple(int(number) for number in short), full)


def mixed_bits(values: NDArray[Any], salt: str) -> NDArray[Any]:
    """[rows] uint64, a bijection of uint64 `values` that looks random and depends on `salt` (splitmix64's finaliser).

    Distinct ids stay distinct, so that an order by these numbers has no ties.
    """
    import numpy

    from components.data.choosing import hash_number
    from components.data.text_units import mixed

    return mixed(values ^ numpy.uint64(hash_number(f"mix chats:{salt}")))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
