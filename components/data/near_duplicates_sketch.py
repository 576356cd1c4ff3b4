"""What one part of unified rows is boiled down to before rows are compared: a file of numbers beside the texts.

The wide half of `data.deduplicate`: parts are sketched one by one, anywhere. For each row: what decides which of two
duplicates stays, the digest of the whole text for exact ones, the band hashes and the sorted shingles of the MinHash
scheme (near_duplicates.py), and whether it holds a benchmark's prompt (decontamination.py). The file is Arrow IPC, so
that the other half can map one column of it into memory without reading the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from components.contract import Tell
from components.data.decontamination import Hit, opened_index
from components.data.near_duplicates import Banding, band_keys, shingle_sets, signatures
from components.data.text_units import ngrams, normalised, units_of
from components.shards import written_whole

if TYPE_CHECKING:
    import pyarrow

READ: Final = ("row_id", "source", "where", "text", "messages", "num_chars")
CLEAN: Final = -1
"""The item of a row that holds none."""
_BATCH_ROWS: Final = 1024
_BATCH_CHARACTERS: Final = 1 << 19
"""Characters worked on at once: the arrays behind them stay in the cache of a core, and memory follows this alone."""
_WRITTEN_BYTES: Final = 16 << 20
"""Of a sketch that are written at once."""


@dataclass(frozen=True)
class SketchShard:
    """Everything that the sketch of one part depends on, and the file it becomes.

    preferred: sources, the best first. items: the benchmarks' texts, or None.
    """

    file: Path
    part: Path
    ngram: int
    num_permutations: int
    cut: Banding
    preferred: tuple[str, ...]
    items: Path | None
    benchmark_ngram: int
    benchmark_overlap: float


@dataclass(frozen=True)
class _Batch:
    """Rows that are worked on together. turns: of all rows, normalised; turns_of_row: how many each has."""

    row_ids: list[str]
    sources: list[str]
    wheres: list[str]
    sizes: list[int]
    turns: list[str]
    turns_of_row: list[int]


def sketch_part(shard: SketchShard, tell: Tell) -> int:
    """Write the sketch of one part; gives its number of rows. Runs in any process that sees the paths."""
    import pyarrow
    from pyarrow import parquet

    schema = sketch_schema(shard.cut)
    done = size = 0
    with (
        written_whole(shard.file) as beside,
        parquet.ParquetFile(shard.part) as part,
        pyarrow.OSFile(str(beside), "wb") as sink,
        pyarrow.ipc.new_file(sink, schema) as writer,
    ):
        total = part.metadata.num_rows
        waiting: list[pyarrow.RecordBatch] = []
        for batch in _batches(part):
            waiting.append(_sketched(batch, shard, schema))
            done, size = done + len(batch.row_ids), size + waiting[-1].nbytes
            if size >= _WRITTEN_BYTES or done == total:
                writer.write_batch(pyarrow.Table.from_batches(waiting).combine_chunks().to_batches()[0])
                waiting, size = [], 0
            tell(done / total)
    return done


def sketch_schema(cut: Banding) -> pyarrow.Schema:
    """The columns of a sketch; nothing is null.

    preference: place of the row's source in the wanted order. tie: a hash of source and where. item, share, matched:
    what the row holds of a benchmark (CLEAN: nothing). band_N: one key for each band, 0 where there are no shingles.
    """
    import pyarrow

    wide, text = pyarrow.uint64(), pyarrow.string()
    columns = {"digest": pyarrow.binary(16), "preference": pyarrow.uint32(), "num_chars": pyarrow.int64()}
    columns |= {"row_id": wide, "tie": wide, "item": pyarrow.int32(), "share": pyarrow.float64(), "matched": text}
    columns |= {f"band_{number}": wide for number in range(cut.num_bands)}
    columns |= {"shingles": pyarrow.large_list(pyarrow.field("item", pyarrow.uint32(), nullable=False))}
    return pyarrow.schema([pyarrow.field(name, kind, nullable=False) for name, kind in columns.items()])


def said_in(text: str, messages: str) -> list[str]:
    """The turns of a row from its two columns, with reasoning and tool calls; a document is one turn."""
    return [_said(message) for message in json.loads(messages)] if messages else [text]


def _said(message: Mapping[str, Any]) -> str:
    said: str = message.get("content") or ""
    if message.get("reasoning_content"):
        said = f"{message['reasoning_content']}\n{said}"
    if message.get("tool_calls"):
        said = f"{said}\n{json.dumps(message['tool_calls'], ensure_ascii=False, sort_keys=True)}"
    return said


def digest_of(turns: Sequence[str]) -> bytes:
    """128 bits that name what normalised turns say; white space counts only where it parts words."""
    said = "\x1e".join(" ".join(turn.split()) for turn in turns)
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(part: Any) -> Iterator[_Batch]:
    """The rows of a part in pieces of about _BATCH_CHARACTERS."""
    for group in part.iter_batches(batch_size=_BATCH_ROWS, columns=list(READ)):
        columns = [group.column(name).to_pylist() for name in READ]
        batch, size = _Batch([], [], [], [], [], []), 0
        for row_id, source, where, text, messages, num_chars in zip(*columns, strict=True):
            turns = [normalised(turn) for turn in said_in(text, messages)]
            batch.row_ids.append(row_id)
            batch.sources.append(source)
            batch.wheres.append(where)
            batch.sizes.append(num_chars)
            batch.turns.extend(turns)
            batch.turns_of_row.append(len(turns))
            size += sum(map(len, turns))
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = _Batch([], [], [], [], [], []), 0
        if batch.row_ids:
            yield batch


def _sketched(batch: _Batch, shard: SketchShard, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    import pyarrow

    num_rows = len(batch.row_ids)
    turns = units_of(batch.turns)
    rows = turns.joined(batch.turns_of_row)
    shingles, offsets = shingle_sets(*ngrams(rows, shard.ngram)[::2])
    filled = np.flatnonzero(np.diff(offsets))
    found = signatures(shingles, np.append(offsets[filled], offsets[-1]), shard.num_permutations)
    keys = np.zeros((shard.cut.num_bands, num_rows), np.uint64)
    keys[:, filled] = band_keys(found, shard.cut)
    hits: list[Hit] = []
    if shard.items is not None:
        index = opened_index(shard.items, shard.benchmark_ngram, shard.benchmark_overlap)
        hits = index.hits(batch.turns, turns, rows, batch.turns_of_row)
    items, shares, matched = np.full(num_rows, CLEAN, np.int32), np.zeros(num_rows), [""] * num_rows
    for hit in hits:
        items[hit.row], shares[hit.row], matched[hit.row] = hit.item, hit.share, hit.matched
    places = {source: number for number, source in enumerate(shard.preferred)}
    ends = np.cumsum(batch.turns_of_row).tolist()
    columns: dict[str, Any] = {
        "digest": [digest_of(batch.turns[end - n : end]) for end, n in zip(ends, batch.turns_of_row, strict=True)],
        "preference": [places.get(source, len(places)) for source in batch.sources],
        "num_chars": batch.sizes,
        "row_id": np.frombuffer(bytes.fromhex("".join(batch.row_ids)), ">u8").astype(np.uint64),
        "tie": _ties(batch),
        "item": items,
        "share": shares,
        "matched": matched,
        **{f"band_{number}": key for number, key in enumerate(keys)},
    }
    arrays = [pyarrow.array(columns[field.name], field.type) for field in list(schema)[:-1]]
    shingle_type = schema.field("shingles").type
    arrays.append(pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(shingles), type=shingle_type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _ties(batch: _Batch) -> list[int]:
    """For each row a number that depends on where it comes from, to choose between rows of equal content."""
    places = [f"{source}\0{where}".encode() for source, where in zip(batch.sources, batch.wheres, strict=True)]
    return [int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "big") for place in places]
