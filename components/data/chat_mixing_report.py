"""Reports a mix: the requested and the actual share of every source, language and domain, as a table and as sentences.

Where the strata are sources, no share was requested for a language: its requested share is then computed from those of
the sources, so that a mix that leans to one language becomes visible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.data.chat_mixing_plan import TrainingSplit
from components.data.chat_mixing_rows import DIMENSIONS, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


def strata_table(
    rows: Rows, training: TrainingSplit, evaluation: Mapping[str, NDArray[Any]], strata: str, unit: NDArray[Any]
) -> list[dict[str, Any]]:
    """One entry for every source, language and domain.

    An entry is {"of", "name", "rows_read", "tokens_read", "asked", "got" (shares of the unit), "rows", "tokens" (in
    training), and rows in test, warm_up and validation}.

    unit: [rows] the size by which shares are computed: tokens, or 1.
    """
    import numpy

    table = []
    candidates, train, shares = training.candidates, training.rows, training.shares
    of_strata = rows.labels[strata]
    available = numpy.bincount(of_strata[candidates], weights=unit[candidates], minlength=len(shares))
    worth = numpy.divide(
        shares, available, out=numpy.zeros_like(shares), where=available > 0
    )  # requested share of one unit
    requested_of_row = worth[of_strata] * unit
    total = max(1.0, float(unit[train].sum()))
    for dimension in DIMENSIONS:
        labels, count = rows.labels[dimension], len(rows.names[dimension])
        if dimension == strata:
            requested = shares
        else:
            requested = numpy.bincount(labels[candidates], weights=requested_of_row[candidates], minlength=count)
        got = numpy.bincount(labels[train], weights=unit[train], minlength=count) / total
        in_rows, in_tokens = (_totals(labels[train], each, count) for each in (None, rows.tokens[train]))
        read, read_tokens = (_totals(labels, each, count) for each in (None, rows.tokens))
        splits = {split: _totals(labels[split_rows], None, count) for split, split_rows in evaluation.items()}
        for number, name in enumerate(rows.names[dimension]):
            entry = {
                "of": dimension,
                "name": name,
                "rows_read": read[number],
                "tokens_read": read_tokens[number],
                "asked": round(float(requested[number]), 6),
                "got": round(float(got[number]), 6),
                "rows": in_rows[number],
                "tokens": in_tokens[number],
            }
            table.append({**entry, **{split: counts[number] for split, counts in splits.items()}})
    return table


def sentences(table: Sequence[Mapping[str, Any]], strata: str, by: str) -> list[str]:
    """A line each for sources, languages and domains: actual shares, largest first, and requested ones that differ."""
    lines = []
    for dimension in DIMENSIONS:
        entries = [entry for entry in table if entry["of"] == dimension and (entry["rows"] or entry["asked"])]
        if len(entries) < 2 and not (entries and entries[0]["name"]):
            continue
        entries.sort(key=lambda entry: (-entry["got"], entry["name"]))
        word = "asked" if dimension == strata else "expected"  # what the asked shares bring of it
        parts = [_share_text(entry, word) for entry in entries[:8]]
        if len(entries) > 8:
            parts.append(f"{len(entries) - 8} more {sum(entry['got'] for entry in entries[8:]):.1%}")
        lines.append(f"{dimension}s by {by}: {', '.join(parts)}")
    return lines


def _share_text(entry: Mapping[str, Any], word: str) -> str:
    name = entry["name"] or "unknown"
    got, requested = f"{entry['got']:.1%}", f"{entry['asked']:.1%}"
    return f"{name} {got}" if got == requested else f"{name} {got} ({word} {requested})"


def _totals(labels: NDArray[Any], weights: NDArray[Any] | None, count: int) -> list[int]:
    import numpy

    return [int(number) for number in numpy.bincount(labels, weights=weights, minlength=count)]
