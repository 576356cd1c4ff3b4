"""The sharded half of `data.deduplicate`: a sketch of each part of unified rows, a file of numbers beside the texts.

A sketch holds for each row the numbers that decide which of two duplicates stays, the digest of the whole text for
exact duplicates, the band hashes and sorted shingles of MinHash (near_duplicates.py), and the benchmark prompt that it
contains (decontamination.py). It is an Arrow IPC file, so that the other half can map single columns into memory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from components.contract import ReportProgress
from components.data.decontamination import Hit, cached_index
from components.data.near_duplicates import Banding, band_keys, shingle_sets, signatures
from components.data.text_units import ngrams, normalised, units_of
from components.shards import written_whole

if TYPE_CHECKING:
    import pyarrow

READ: Final = ("row_id", "source", "where", "text", "messages", "num_chars")
CLEAN: Final = -1
"""The item of a row that holds no benchmark item."""
_BATCH_ROWS: Final = 1024
_BATCH_CHARACTERS: Final = 1 << 19
"""Characters in one batch: its arrays fit into the cache of a core, and it alone bounds the memory."""
_WRITTEN_BYTES: Final = 16 << 20
"""Bytes of a sketch that are written at once."""


@dataclass(frozen=True)
class SketchShard:
    """The inputs of the sketch of one part, and its file.

    preferred: source names, the best first. items: file of the benchmarks' texts, or None.
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
    """Rows that are sketched together. turns: of all rows, normalised; turns_of_row: number of turns of each row."""

    row_ids: list[str]
    sources: list[str]
    locations: list[str]
    sizes: list[int]
    turns: list[str]
    turns_of_row: list[int]


def sketch_part(shard: SketchShard, report_progress: ReportProgress) -> int:
    """Write the sketch of one part; returns its number of rows. Runs in any process that sees the paths."""
    import pyarrow
    from pyarrow import parquet

    schema = sketch_schema(shard.cut)
    done = size = 0
    with (
        written_whole(shard.file) as partial,
        parquet.ParquetFile(shard.part) as part,
        pyarrow.OSFile(str(partial), "wb") as sink,
        pyarrow.ipc.new_file(sink, schema) as writer,
    ):
        total = part.metadata.num_rows
        waiting: list[pyarrow.RecordBatch] = []
        for batch in _batches(part):
            waiting.append(_sketch(batch, shard, schema))
            done, size = done + len(batch.row_ids), size + waiting[-1].nbytes
            if size >= _WRITTEN_BYTES or done == total:
                writer.write_batch(pyarrow.Table.from_batches(waiting).combine_chunks().to_batches()[0])
                waiting, size = [], 0
            report_progress(done / total)
    return done


def sketch_schema(cut: Banding) -> pyarrow.Schema:
    """The columns of a sketch; nothing is null.

    preference: rank of the row's source among the preferred ones. tie: a hash of source and where. item, share,
    matched: the benchmark item in the row (CLEAN: none). band_N: the key of each band, 0 for a row without shingles.
    """
    import pyarrow

    wide, text = pyarrow.uint64(), pyarrow.string()
    columns = {"digest": pyarrow.binary(16), "preference": pyarrow.uint32(), "num_chars": pyarrow.int64()}
    columns |= {"row_id": wide, "tie": wide, "item": pyarrow.int32(), "share": pyarrow.float64(), "matched": text}
    columns |= {f"band_{number}": wide for number in range(cut.num_bands)}
    columns |= {"shingles": pyarrow.large_list(pyarrow.field("item", pyarrow.uint32(), nullable=False))}
    return pyarrow.schema([pyarrow.field(name, kind, nullable=False) for name, kind in columns.items()])


def turns_of(text: str, messages: str) -> list[str]:
    """The texts of a row's turns, with reasoning and tool calls; a document is one turn."""
    return [_message_text(message) for message in json.loads(messages)] if messages else [text]


def _message_text(message: Mapping[str, Any]) -> str:
    text: str = message.get("content") or ""
    if message.get("reasoning_content"):
        text = f"{message['reasoning_content']}\n{text}"
    if message.get("tool_calls"):
        text = f"{text}\n{json.dumps(message['tool_calls'], ensure_ascii=False, sort_keys=True)}"
    return text


def digest_of(turns: Sequence[str]) -> bytes:
    """A 128-bit digest of normalised turns; white space counts only as a separator of words."""
    joined = "\x1e".join(" ".join(turn.split()) for turn in turns)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(part: Any) -> Iterator[_Batch]:
    """The rows of a part in batches of about _BATCH_CHARACTERS."""
    for group in part.iter_batches(batch_size=_BATCH_ROWS, columns=list(READ)):
        columns = [group.column(name).to_pylist() for name in READ]
        batch, size = _Batch([], [], [], [], [], []), 0
        for row_id, source, location, text, messages, num_chars in zip(*columns, strict=True):
            turns = [normalised(turn) for turn in turns_of(text, messages)]
            batch.row_ids.append(row_id)
            batch.sources.append(source)
            batch.locations.append(location)
            batch.sizes.append(num_chars)
            batch.turns.extend(turns)
            batch.turns_of_row.append(len(turns))
            size += sum(map(len, turns))
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = _Batch([], [], [], [], [], []), 0
        if batch.row_ids:
            yield batch


def _sketch(batch: _Batch, shard: SketchShard, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    import pyarrow

    num_rows = len(batch.row_ids)
    turns = units_of(batch.turns)
    rows = turns.joined(batch.turns_of_row)
    shingles, offsets = shingle_sets(*ngrams(rows, shard.ngram)[::2])
    filled = np.flatnonzero(np.diff(offsets))
    minima = signatures(shingles, np.append(offsets[filled], offsets[-1]), shard.num_permutations)
    keys = np.zeros((shard.cut.num_bands, num_rows), np.uint64)
    keys[:, filled] = band_keys(minima, shard.cut)
    hits: list[Hit] = []
    if shard.items is not None:
        index = cached_index(shard.items, shard.benchmark_ngram, shard.benchmark_overlap)
        hits = index.hits(batch.turns, turns, rows, batch.turns_of_row)
    items, shares, matched = np.full(num_rows, CLEAN, np.int32), np.zeros(num_rows), [""] * num_rows
    for hit in hits:
        items[hit.row], shares[hit.row], matched[hit.row] = hit.item, hit.share, hit.matched
    preferences = {source: number for number, source in enumerate(shard.preferred)}
    ends = np.cumsum(batch.turns_of_row).tolist()
    columns: dict[str, Any] = {
        "digest": [digest_of(batch.turns[end - n : end]) for end, n in zip(ends, batch.turns_of_row, strict=True)],
        "preference": [preferences.get(source, len(preferences)) for source in batch.sources],
        "num_chars": batch.sizes,
        "row_id": np.frombuffer(bytes.fromhex("".join(batch.row_ids)), ">u8").astype(np.uint64),
        "tie": _tie_breakers(batch),
        "item": items,
        "share": shares,
        "matched": matched,
        **{f"band_{number}": key for number, key in enumerate(keys)},
    }
    arrays = [pyarrow.array(columns[field.name], field.type) for field in list(schema)[:-1]]
    shingle_type = schema.field("shingles").type
    arrays.append(pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(shingles), type=shingle_type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _tie_breakers(batch: _Batch) -> list[int]:
    """For each row a hash of its origin, which ranks rows of equal content."""
    origins = [
        f"{source}\0{location}".encode() for source, location in zip(batch.sources, batch.locations, strict=True)
    ]
    return [int.from_bytes(hashlib.blake2b(origin, digest_size=8).digest(), "big") for origin in origins]
