"""What deduplication writes: the rows that stay, and for each row that goes which row or prompt it goes for.

`dropped.parquet` has the columns of every step (reason, source, where, excerpt) and beside them row_id; kept_id and
kept_where, the row that stays instead, or the prompt_id and workload that a contaminated row holds; similarity, the
Jaccard index with the row that stays (near duplicates that others connect may lie below the threshold) or the share of
the prompt; matched, the text of the prompt that was found, normalised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from components.contract import Context
from components.data.chats import COLUMNS, DROPPED, EXCERPT_CHARACTERS, ChatWriter, file_batches
from components.data.decontamination import Item
from components.data.near_duplicates_merge import CONTAMINATED, NEAR, REASONS, Verdict, jaccard
from components.data.near_duplicates_sketch import said_in
from components.data.near_duplicates_table import Sketches

if TYPE_CHECKING:
    import pyarrow
    from numpy.typing import NDArray

_NAMES: Final = ("row_id", "source", "where")


@dataclass(frozen=True)
class _Going:
    """The rows that go, by their place in the input: what each goes for. order of all: `places`, ascending."""

    places: NDArray[np.int64]
    kept_id: list[str]
    kept_source: list[str]
    kept_where: list[str]
    similarity: list[float]
    matched: list[str]


def write_verdict(
    parts: Sequence[Path], sketches: Sketches, verdict: Verdict, items: Sequence[Item], ctx: Context
) -> dict[str, Any]:
    """Write the parts, the manifest and `dropped.parquet`; gives the counts: read = kept + all that was dropped."""
    import pyarrow
    from pyarrow import parquet

    going = _going(parts, sketches, verdict, items)
    counts: Counter[str] = Counter()
    across: Counter[str] = Counter()
    schema = _schema()
    start = 0
    with ChatWriter(ctx.out) as writer, parquet.ParquetWriter(ctx.out / DROPPED, schema, compression="zstd") as dropped:
        for batch in (batch for part in parts for batch in file_batches(part, COLUMNS)):
            reasons = verdict.reason[start : start + len(batch)]
            writer.write_batch(batch.filter(pyarrow.array(reasons == 0)))
            gone = pyarrow.array(np.flatnonzero(reasons))
            if len(gone):
                rows = _dropped_rows(batch.take(gone), reasons[reasons > 0], going, start + gone.to_numpy())
                dropped.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
                counts.update(row["reason"] for row in rows)
                across.update(
                    _between(row, going, place) for row, place in zip(rows, start + gone.to_numpy(), strict=True)
                )
            start += len(batch)
            ctx.progress(start, sketches.num_rows, "rows written")
    num_dropped = sum(counts.values())
    assert start == sketches.num_rows == writer.num_rows + num_dropped, "a row was lost"
    by_workload = Counter(items[item].workload for item in verdict.item[verdict.reason == CONTAMINATED])
    return {
        "num_rows": writer.num_rows,
        "num_read": start,
        "num_dropped": num_dropped,
        "dropped": dict(counts.most_common()),
        "by_source": dict(sorted(writer.by_source.items())),
        "duplicates_between": {pair: count for pair, count in sorted(across.items()) if pair},
        "contaminated_by_workload": dict(sorted(by_workload.items())),
        "passes": verdict.num_passes,
    }


def _schema() -> pyarrow.Schema:
    import pyarrow

    texts = ("reason", "source", "where", "excerpt", "row_id", "kept_id", "kept_where")
    fields = [pyarrow.field(name, pyarrow.string(), False) for name in texts]
    fields.append(pyarrow.field("similarity", pyarrow.float64(), False))
    return pyarrow.schema([*fields, pyarrow.field("matched", pyarrow.string(), False)])


def _going(parts: Sequence[Path], sketches: Sketches, verdict: Verdict, items: Sequence[Item]) -> _Going:
    """What each row that goes goes for."""
    import pyarrow

    places = np.flatnonzero(verdict.reason)
    reasons, kept = verdict.reason[places], verdict.kept_by[places]
    stays = np.unique(kept[reasons != CONTAMINATED])
    found, start = [], 0
    for batch in (batch for part in parts for batch in file_batches(part, _NAMES)):
        here = stays[np.searchsorted(stays, start) : np.searchsorted(stays, start + len(batch))]
        found.append(batch.take(pyarrow.array(here - start)))
        start += len(batch)
    names = pyarrow.Table.from_batches(found) if found else None
    near = np.flatnonzero(reasons == NEAR)
    similarity = np.ones(len(places))
    similarity[near] = jaccard(sketches, places[near], kept[near])
    held = sketches.matched(places[reasons == CONTAMINATED])
    going = _Going(places, [], [], [], similarity.tolist(), [])
    columns = {name: names.column(name).to_pylist() for name in _NAMES} if names is not None else {}
    numbers = np.searchsorted(stays, kept)
    for at, (place, reason) in enumerate(zip(places.tolist(), reasons.tolist(), strict=True)):
        if reason == CONTAMINATED:
            item = items[int(verdict.item[place])]
            going.similarity[at], matched = held[place]
            entry = (item.prompt_id, "", item.workload, matched)
        else:
            number = int(numbers[at])
            entry = (columns["row_id"][number], columns["source"][number], columns["where"][number], "")
        for column, value in zip(
            (going.kept_id, going.kept_source, going.kept_where, going.matched), entry, strict=True
        ):
            column.append(value)
    return going


def _dropped_rows(
    rows: pyarrow.RecordBatch, reasons: NDArray[np.uint8], going: _Going, places: NDArray[np.int64]
) -> list[dict[str, Any]]:
    first = int(np.searchsorted(going.places, places[0]))
    made = []
    for at, (row, reason) in enumerate(zip(rows.to_pylist(), reasons.tolist(), strict=True), start=first):
        excerpt = _shown("\n\n".join(said_in(row["text"], row["messages"]))[:EXCERPT_CHARACTERS])
        made.append(
            {
                "reason": REASONS[reason],
                **{name: row[name] for name in _NAMES},
                "excerpt": excerpt,
                "kept_id": going.kept_id[at],
                "kept_where": going.kept_where[at],
                "similarity": going.similarity[at],
                "matched": _shown(going.matched[at]),
            }
        )
    return made


def _shown(text: str) -> str:
    """The text with half characters replaced: JSON can hold them, a table cannot."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _between(row: dict[str, Any], going: _Going, place: int) -> str:
    """ "source -> source of the row that stays", "" for a contaminated row."""
    kept = going.kept_source[int(np.searchsorted(going.places, place))]
    return f"{row['source']} -> {kept}" if kept else ""
