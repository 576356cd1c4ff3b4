"""The history: one immutable, typed Parquet file for each (table, key, session), written and read by many at once.

history/TABLE/KEY.SESSION.parquet is written under a temporary name and renamed, so a reader never sees half a file, and
appends wait for nobody but the swap of a manifest (storage/history/segments.py). Nothing is ever replaced: a repeated
measurement is another session, beside the one before. The schema is enforced on write (storage/history/schema.py).
Past a
few hundred files a table is compacted (storage/history/segments.py). Everything here can be deleted and rebuilt from
the store, the run journals and the promotion log.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.contract import UserError
from components.rows import TABLES
from storage.artifacts.sessions import file_key
from storage.history import segments
from storage.history import segments as compaction
from storage.history.records import Provenance, columns_of
from storage.history.schema import check_row, schema_of
from storage.history.segments import COMPACT_AT


def history_dir(home: Path) -> Path:
    """Where the Parquet files of one home live."""
    return home / "history"


def write_table(home: Path, table: str, key: str, rows: Iterable[Mapping[str, Any]], location: str) -> None:
    """Write the rows of one (table, key) as one Parquet file, or do nothing when it is there already.

    key: of a run, a promotion, or a session of an artifact (`file_key`).
    """
    assert key and key[0] not in "_." and "/" not in key, f"not a file name: {key!r}"
    directory = history_dir(home) / table
    if segments.is_known(directory, key):
        return
    columns = columns_of(table)
    checked_rows = [check_row(table, row, columns, f"{location} row {i}") for i, row in enumerate(rows, 1)]
    content = pa.Table.from_pylist(checked_rows, schema=schema_of(table))
    directory.mkdir(parents=True, exist_ok=True)
    with segments.writing(directory):
        if not segments.is_known(directory, key):
            segments.write_parquet(directory / f"{key}.parquet", content)


def write_record(home: Path, table: str, key: str, rows: Sequence[Any]) -> None:
    """Write rows of storage's own tables (storage/history/records.py)."""
    write_table(home, table, key, [dataclasses.asdict(row) for row in rows], location=key)


def write_measured(home: Path, directory: Path, provenance: Provenance) -> None:
    """Write every `TABLE.jsonl` of an artifact's directory into the history, with its provenance.

    Raises:
        UserError: a file is not JSON lines, or a row does not have the columns and types of components/rows.py.
    """
    shared_columns = dataclasses.asdict(provenance)
    for table in TABLES:
        source, key = directory / f"{table}.jsonl", file_key(provenance.artifact_key, provenance.session)
        if source.is_file() and not is_known(home, table, key):
            rows = ({**row, **shared_columns} for row in _json_rows(source))
            write_table(home, table, key, rows, location=f"{provenance.step} {source.name}")


def is_known(home: Path, table: str, key: str) -> bool:
    """Whether the rows of this key are in the history."""
    return segments.is_known(history_dir(home) / table, key)


def sessions_known(home: Path, artifact_key: str) -> set[str]:
    """The sessions of an artifact that the history has; "" is one from before there were sessions."""
    names = segments.names_of(history_dir(home) / "artifact", artifact_key)
    return {name.removeprefix(artifact_key).removeprefix(".") for name in names}


def files_of(home: Path, table: str) -> list[str]:
    """The files that hold a table's rows now; they stay while the lock `segments.reading` is held."""
    return segments.files_of(history_dir(home) / table)


def compact(home: Path, at_least: int = COMPACT_AT, *, whole: bool = False) -> dict[str, int]:
    """Merge the files of every table that has at least so many; table -> number of files merged. See segments.py."""
    return compaction.compact(history_dir(home), at_least, whole=whole)


def _json_rows(source: Path) -> Iterator[dict[str, Any]]:
    with source.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{source.name}:{number}: not a JSON row ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{source.name}:{number}: a row is an object, not {type(row).__name__}")
            yield row
