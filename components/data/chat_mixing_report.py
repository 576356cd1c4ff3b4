"""What became of a mix, for people: asked and got of every source, language and domain, and the sentences that say it.

Where the strata are sources, a language was not asked for by name: its asked share is what the asked shares of the
sources bring of it, so that a mix that leans to one language shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.data.chat_mixing_plan import Chosen
from components.data.chat_mixing_rows import DIMENSIONS, Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


def strata_table(
    rows: Rows, chosen: Chosen, judged_on: Mapping[str, NDArray[Any]], strata: str, unit: NDArray[Any]
) -> list[dict[str, Any]]:
    """One entry for every source, language and domain.

    unit: [rows] what shares are of, tokens or ones.

    {"of", "name", "rows_read", "tokens_read", "asked", "got" (shares of the unit), "rows", "tokens" (in training),
    and rows in test, warm_up and validation}.
    """
    import numpy

    table = []
    candidates, taken, shares = chosen.candidates, chosen.rows, chosen.shares
    of_strata = rows.labels[strata]
    there = numpy.bincount(of_strata[candidates], weights=unit[candidates], minlength=len(shares))
    worth = numpy.divide(shares, there, out=numpy.zeros_like(shares), where=there > 0)  # asked per unit that is there
    asked_of_row = worth[of_strata] * unit
    total = max(1.0, float(unit[taken].sum()))
    for dimension in DIMENSIONS:
        labels, count = rows.labels[dimension], len(rows.names[dimension])
        if dimension == strata:
            asked = shares
        else:
            asked = numpy.bincount(labels[candidates], weights=asked_of_row[candidates], minlength=count)
        got = numpy.bincount(labels[taken], weights=unit[taken], minlength=count) / total
        in_rows, in_tokens = (_counted(labels[taken], each, count) for each in (None, rows.tokens[taken]))
        read, read_tokens = (_counted(labels, each, count) for each in (None, rows.tokens))
        splits = {split: _counted(labels[chosen], None, count) for split, chosen in judged_on.items()}
        for number, name in enumerate(rows.names[dimension]):
            entry = {
                "of": dimension,
                "name": name,
                "rows_read": read[number],
                "tokens_read": read_tokens[number],
                "asked": round(float(asked[number]), 6),
                "got": round(float(got[number]), 6),
                "rows": in_rows[number],
                "tokens": in_tokens[number],
            }
            table.append({**entry, **{split: counts[number] for split, counts in splits.items()}})
    return table


def sentences(table: Sequence[Mapping[str, Any]], strata: str, by: str) -> list[str]:
    """A line for each of source, language and domain: got beside asked where they differ, the largest first."""
    said = []
    for dimension in DIMENSIONS:
        of_it = [entry for entry in table if entry["of"] == dimension and (entry["rows"] or entry["asked"])]
        if len(of_it) < 2 and not (of_it and of_it[0]["name"]):
            continue
        of_it.sort(key=lambda entry: (-entry["got"], entry["name"]))
        word = "asked" if dimension == strata else "expected"  # what the asked shares bring of it
        parts = [_share(entry, word) for entry in of_it[:8]]
        if len(of_it) > 8:
            parts.append(f"{len(of_it) - 8} more {sum(entry['got'] for entry in of_it[8:]):.1%}")
        said.append(f"{dimension}s by {by}: {', '.join(parts)}")
    return said


def _share(entry: Mapping[str, Any], word: str) -> str:
    name = entry["name"] or "unknown"
    got, asked = f"{entry['got']:.1%}", f"{entry['asked']:.1%}"
    return f"{name} {got}" if got == asked else f"{name} {got} ({word} {asked})"


def _counted(labels: NDArray[Any], weights: NDArray[Any] | None, count: int) -> list[int]:
    import numpy

    return [int(number) for number in numpy.bincount(labels, weights=weights, minlength=count)]
