"""Compaction: many small Parquet files become few large ones, while others read and write, whenever it is killed.

Ten thousand files take seconds to scan, one file of the same rows takes milliseconds. A compaction writes a segment of
the files that count, then swaps the manifest, then deletes what nobody reads any more. A kill before the swap changes
nothing, a kill after it loses nothing, and the next compaction deletes what was left over. Segments grow by tiers
(O'Neil et al. 1996): a segment is rewritten only together with at least a quarter of its size in newer rows, so a row
is copied a few times in its life and a table has a handful of files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import Dataset, dataset

from storage import segments
from storage.schema import all_tables, reading_schema
from storage.segments import Manifest, Segment

COMPACT_AT = 300  # files of their own in a table: their scan takes a tenth of a second
TIER = 4  # a segment is merged when the rows newer than it are at least this part of it
ROWS_AT_ONCE = 122_880  # about what a compaction holds in memory, and the largest row group
GROUP_BYTES = 4 << 20  # of a row group before compression: a question about the newest rows reads the last few groups


def compact(history: Path, at_least: int = COMPACT_AT, *, whole: bool = False) -> dict[str, int]:
    """Merge the files of every table that has at least so many; table -> number of files merged.

    whole: all segments of such a table become one; with at_least 0 every table becomes one file.
    """
    merged: dict[str, int] = {}
    for table in all_tables():
        directory = history / table
        if directory.is_dir() and (count := _compact_table(history, directory, table, at_least, whole)):
            merged[table] = count
    return merged


def _compact_table(history: Path, directory: Path, table: str, at_least: int, whole: bool) -> int:
    with segments.compacting(directory):
        old = segments.read_manifest(directory)
        _sweep(history, directory, old)
        old = segments.read_manifest(directory)
        new_keys = segments.fresh_keys(directory, old)
        if len(new_keys) < at_least or len(new_keys) + len(old.segments) < 2:
            return 0
        for name, fault in segments.faulty_files(directory):  # what is merged counts as whole from then on
            raise segments.DamagedHistory(f"{directory / name}: {fault}; {segments.REPAIR_HINT}")
        names = [f"{key}.parquet" for key in new_keys]
        rows = _open_files(directory, names, table).count_rows()
        untouched = list(old.segments)
        merged: list[Segment] = []
        while untouched and (whole or untouched[-1].rows <= TIER * rows):
            merged.insert(0, untouched.pop())
            rows += merged[0].rows
        sources = [*(segment.file for segment in merged), *names]
        segment = _write_segment(directory, table, _read_batches(directory, sources, table))
        assert segment.rows == rows, f"{table}: {segment.rows} rows written of {rows}"
        keys = _write_keys(directory, segments.segment_keys(directory, old) | set(new_keys))
        replaced = [*sources, *([old.keys] if old.keys else [])]
        _swap(history, directory, old, Manifest((*untouched, segment), keys), replaced)
        return len(sources)


def _write_keys(directory: Path, keys: set[str]) -> str:
    """A new file of the keys in segments; it counts once a manifest names it."""
    name = segments.new_name("keys", ".txt")
    segments.write_text(directory / name, "\n".join(sorted(keys)) + "\n")
    return name


def _swap(history: Path, directory: Path, old: Manifest, new: Manifest, replaced: list[str]) -> None:
    """From now on the new manifest counts; files it replaces are deleted, or retired while somebody reads."""
    retired = (*old.retired, *replaced)
    with segments.writing(directory, alone=True):
        segments.swap_manifest(directory, Manifest(new.segments, new.keys, retired))
    _sweep(history, directory, segments.read_manifest(directory))


def _sweep(history: Path, directory: Path, manifest: Manifest) -> None:
    """Delete retired files if nobody reads, and what killed compactions and writers have left."""
    with segments.writing(directory, alone=True):
        named = manifest.files()
        leftovers = [
            name
            for name in os.listdir(directory)
            if (name.startswith(("_segment-", "_keys-")) and name not in named) or name.endswith(".tmp")
        ]
        segments.delete(directory, leftovers)  # no manifest ever named them, and no writer is at work
    if not manifest.retired:
        return
    with segments.nobody_reads(history) as is_unread:
        if is_unread:
            with segments.writing(directory, alone=True):
                segments.delete(directory, manifest.retired)
                segments.swap_manifest(directory, Manifest(manifest.segments, manifest.keys))


def _read_batches(directory: Path, names: Iterable[str], table: str) -> Iterator[pa.Table]:
    """The rows of some files under the present schema, about ROWS_AT_ONCE at a time."""
    pending: list[pa.RecordBatch] = []
    for batch in _open_files(directory, names, table).to_batches(batch_size=ROWS_AT_ONCE, fragment_readahead=16):
        pending.append(batch)
        if sum(map(len, pending)) >= ROWS_AT_ONCE:
            yield pa.Table.from_batches(pending)
            pending = []
    if pending:
        yield pa.Table.from_batches(pending)


def _open_files(directory: Path, names: Iterable[str], table: str) -> Dataset:
    files = [str(directory / name) for name in names]
    return dataset(files, schema=reading_schema(table), format=segments.CHECKED_PARQUET)


def _write_segment(directory: Path, table: str, batches: Iterable[pa.Table]) -> Segment:
    """A new segment; it counts once a manifest names it."""
    name = segments.new_name("segment", ".parquet")
    part = segments.part_of(directory / name)
    rows = 0
    with pq.ParquetWriter(part, reading_schema(table), compression="zstd", write_page_checksum=True) as writer:
        for batch in batches:
            fitting = GROUP_BYTES * max(1, len(batch)) // max(1, batch.nbytes)
            writer.write_table(batch, row_group_size=min(ROWS_AT_ONCE, max(1024, fitting)))
            rows += len(batch)
    os.replace(part, directory / name)
    segments.note_sum(directory, name)
    return Segment(name, rows)
