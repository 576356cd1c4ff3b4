"""Step `data.deduplicate`: removes benchmark contamination, exact and near duplicates, before a mix is made.

First a sharded pass computes a sketch of each part (minhash.py); finished sketches survive a kill. Then three passes
over the rows of all sources together remove contaminated rows (decontamination.py), exact duplicates, and near
duplicates (clusters.py). The rows that stay are written in their order.

`dropped.parquet` has the columns of every step (reason, source, where, excerpt) and these: row_id; kept_id and
kept_where, the row that stays instead, or the prompt_id and workload that a contaminated row holds; similarity, the
Jaccard index with the row that stays (it may be below the threshold for rows joined through others) or the share of the
prompt; matched, the normalised text of the prompt that the row holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypedDict

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from components.contract import Chats, Context, Prompts, UserError
from components.data.dedup.clusters import CONTAMINATED, NEAR, REASONS, RowDecisions, decide_rows, jaccard
from components.data.dedup.decontamination import MIN_TURN, Item, items_of, num_too_short, write_items
from components.data.dedup.minhash import banding
from components.data.dedup.sketches import Sketches, SketchShard, sketch_part, turns_of
from components.data.formats.chats import COLUMNS, DROPPED, EXCERPT_CHARACTERS, ChatWriter, file_batches, read_manifest
from components.outside_json import JsonObject
from components.text import as_utf8

_ITEMS: Final = "benchmarks.parquet"
_NAMES: Final = ("row_id", "source", "where")


def deduplicate(
    chats: list[Chats],
    keep_out: list[Prompts] | None,
    *,
    similarity: float,
    ngram: int,
    num_permutations: int,
    prefer: list[str] | None,
    benchmark_ngram: int,
    benchmark_overlap: float,
    ctx: Context,
) -> Chats:
    """The step `data.deduplicate`; its settings are explained in components/data/steps.py."""
    parts = [one.path / part for one in chats for part in read_manifest(one)["parts"]]
    items = items_of(keep_out or [])
    file = ctx.scratch / _ITEMS if items else None
    if file is not None:
        write_items(file, items)
        if short := num_too_short(items):
            ctx.note(f"{short} benchmark prompts are too short to be looked for (fewer than {MIN_TURN} words)")
    cut = banding(similarity, num_permutations)
    shards = [
        SketchShard(
            file=ctx.scratch / f"sketch-{number:05d}.arrow",
            part=part,
            ngram=ngram,
            num_permutations=num_permutations,
            cut=cut,
            preferred=tuple(prefer or ()),
            items=file,
            benchmark_ngram=benchmark_ngram,
            benchmark_overlap=benchmark_overlap,
        )
        for number, part in enumerate(parts)
    ]
    _check_preferred(prefer or [], chats)
    for _ in ctx.map(sketch_part, shards, what="parts read"):
        pass
    with Sketches([shard.file for shard in shards]) as sketches:
        decisions = decide_rows(
            sketches, cut.num_bands, similarity, lambda done, total: ctx.progress(done, total, "bands compared")
        )
        info = write_deduplicated(parts, sketches, decisions, items, ctx)
    _log_summary(info, ctx)
    facts = {"similarity": similarity, "num_bands": cut.num_bands, "band_length": cut.band_length}
    return Chats.of_step(ctx, {**info, **facts, "num_benchmark_texts": len(items)})


def _log_summary(info: JsonObject, ctx: Context) -> None:
    dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in info["dropped"].items())
    ctx.note(f"{info['num_rows']} of {info['num_read']} rows stay; dropped: {dropped or 'none'}; see dropped.parquet")


def _check_preferred(prefer: Sequence[str], chats: Sequence[Chats]) -> None:
    sources = sorted({name for one in chats for name in read_manifest(one)["by_source"]})
    for name in prefer:
        if name not in sources:
            raise UserError(f"prefer: {name}: no row has this source; there are {', '.join(sources)}")


@dataclass(frozen=True)
class _DroppedRows:
    """The dropped rows in the order of `places`, their ascending positions in the input; columns of dropped.parquet."""

    places: NDArray[np.int64]
    kept_id: list[str]
    kept_source: list[str]
    kept_where: list[str]
    similarity: list[float]
    matched: list[str]


class _DroppedRow(TypedDict):
    """One row of `dropped.parquet`."""

    reason: str
    source: str
    where: str
    excerpt: str
    row_id: str
    kept_id: str
    kept_where: str
    similarity: float
    matched: str


def write_deduplicated(
    parts: Sequence[Path], sketches: Sketches, decisions: RowDecisions, items: Sequence[Item], ctx: Context
) -> JsonObject:
    """Write the parts, the manifest and `dropped.parquet`; returns the counts: read = kept + dropped."""
    dropped_rows = _describe_dropped(parts, sketches, decisions, items)
    counts: Counter[str] = Counter()
    across: Counter[str] = Counter()
    schema = _dropped_schema()
    start = 0
    with ChatWriter(ctx.out) as writer, parquet.ParquetWriter(ctx.out / DROPPED, schema, compression="zstd") as file:
        for batch in (batch for part in parts for batch in file_batches(part, COLUMNS)):
            reasons = decisions.reason[start : start + len(batch)]
            writer.write_batch(batch.filter(pyarrow.array(reasons == 0)))
            dropped = np.flatnonzero(reasons)
            if len(dropped):
                rows = _dropped_rows(
                    batch.take(pyarrow.array(dropped)), reasons[dropped], dropped_rows, start + dropped
                )
                file.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
                counts.update(row["reason"] for row in rows)
                places = zip(rows, (start + dropped).tolist(), strict=True)
                across.update(_source_pair(row, dropped_rows, place) for row, place in places)
            start += len(batch)
            ctx.progress(start, sketches.num_rows, "rows written")
    num_dropped = sum(counts.values())
    assert start == sketches.num_rows == writer.num_rows + num_dropped, "a row was lost"
    by_workload = Counter(items[item].workload for item in decisions.item[decisions.reason == CONTAMINATED])
    return {
        "num_rows": writer.num_rows,
        "num_read": start,
        "num_dropped": num_dropped,
        "dropped": dict(counts.most_common()),
        "by_source": dict(sorted(writer.by_source.items())),
        "duplicates_between": {pair: count for pair, count in sorted(across.items()) if pair},
        "contaminated_by_workload": dict(sorted(by_workload.items())),
        "passes": decisions.num_passes,
    }


def _dropped_schema() -> pyarrow.Schema:
    texts = ("reason", "source", "where", "excerpt", "row_id", "kept_id", "kept_where")
    fields = [pyarrow.field(name, pyarrow.string(), False) for name in texts]
    fields.append(pyarrow.field("similarity", pyarrow.float64(), False))
    return pyarrow.schema([*fields, pyarrow.field("matched", pyarrow.string(), False)])


def _describe_dropped(
    parts: Sequence[Path], sketches: Sketches, decisions: RowDecisions, items: Sequence[Item]
) -> _DroppedRows:
    places = np.flatnonzero(decisions.reason)
    reasons, kept_by = decisions.reason[places], decisions.kept_by[places]
    stays = np.unique(kept_by[reasons != CONTAMINATED])
    batches, start = [], 0
    for batch in (batch for part in parts for batch in file_batches(part, _NAMES)):
        in_batch = stays[np.searchsorted(stays, start) : np.searchsorted(stays, start + len(batch))]
        batches.append(batch.take(pyarrow.array(in_batch - start)))
        start += len(batch)
    names = pyarrow.Table.from_batches(batches) if batches else None
    near_at = np.flatnonzero(reasons == NEAR)
    similarity = np.ones(len(places))
    similarity[near_at] = jaccard(sketches, places[near_at], kept_by[near_at])
    contaminated = sketches.matched(places[reasons == CONTAMINATED])
    dropped_rows = _DroppedRows(places, [], [], [], similarity.tolist(), [])
    columns = {name: names.column(name).to_pylist() for name in _NAMES} if names is not None else {}
    numbers = np.searchsorted(stays, kept_by)
    for index, (place, reason) in enumerate(zip(places.tolist(), reasons.tolist(), strict=True)):
        if reason == CONTAMINATED:
            item = items[int(decisions.item[place])]
            dropped_rows.similarity[index], matched = contaminated[place]
            entry = (item.prompt_id, "", item.workload, matched)
        else:
            number = int(numbers[index])
            entry = (columns["row_id"][number], columns["source"][number], columns["where"][number], "")
        for column, value in zip(
            (dropped_rows.kept_id, dropped_rows.kept_source, dropped_rows.kept_where, dropped_rows.matched),
            entry,
            strict=True,
        ):
            column.append(value)
    return dropped_rows


def _dropped_rows(
    rows: pyarrow.RecordBatch, reasons: NDArray[np.uint8], dropped_rows: _DroppedRows, places: NDArray[np.int64]
) -> list[_DroppedRow]:
    first = int(np.searchsorted(dropped_rows.places, places[0]))
    records: list[_DroppedRow] = []
    for at, (row, reason) in enumerate(zip(rows.to_pylist(), reasons.tolist(), strict=True), start=first):
        excerpt = as_utf8("\n\n".join(turns_of(row["text"], row["messages"]))[:EXCERPT_CHARACTERS])
        records.append(
            {
                "reason": REASONS[reason],
                "source": row["source"],
                "where": row["where"],
                "excerpt": excerpt,
                "row_id": row["row_id"],
                "kept_id": dropped_rows.kept_id[at],
                "kept_where": dropped_rows.kept_where[at],
                "similarity": dropped_rows.similarity[at],
                "matched": as_utf8(dropped_rows.matched[at]),
            }
        )
    return records


def _source_pair(row: _DroppedRow, dropped_rows: _DroppedRows, place: int) -> str:
    """The sources of a duplicate and of the row that stays, as "a -> b"; "" for a contaminated row."""
    kept_source = dropped_rows.kept_source[int(np.searchsorted(dropped_rows.places, place))]
    return f"{row['source']} -> {kept_source}" if kept_source else ""
