"""Selects the rows of a mix: shares of strata (sources, languages or domains) become one order over all rows.

Every row gets a level: the sum of the sizes before it in its stratum plus half its own size, divided by the requested
share. Taking rows in the order of their levels keeps to the shares throughout: at level x a stratum has contributed
share * x, to within half a row (the divisor method of Webster and Sainte-Lague, for rows of any size). A limit cuts
that order, so the rows of a smaller limit are among those of a larger one. Within a stratum, rows are ordered by a hash
of their content and the seed: neither the order of the input nor the number of its parts matters.

Without weights the shares are n**(1/T) of the sizes n, as in multilingual pre-training (XLM, arXiv:1901.07291, section
3.1; its alpha is our 1/T), where a size counts up to its cap (T5, arXiv:1910.10683, section 3.5.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from components.contract import UserError
from components.data.dedup.text_units import mix_bits
from components.data.formats.splits import hash_number

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
