"""The history: one immutable, typed Parquet file for each (table, key, session), written and read by many at once.

history/TABLE/KEY.SESSION.parquet is written under a temporary name and renamed, so a reader never sees half a file, and
appends wait for nobody but the swap of a manifest (storage/history/segments.py). Nothing is ever replaced: a repeated
measurement is another session, beside the one before. The schema is enforced on write (storage/history/schema.py).
Past a few hundred files a table is compacted. Everything here can be deleted and rebuilt from the store, the run
journals and the promotion log (storage/history/write.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.dataset import Dataset, dataset

from components.contract import UserError
from components.rows import TABLES
from storage.artifacts.sessions import file_key
from storage.history import segments
from storage.history.records import Provenance, columns_of
from storage.history.schema import all_tables, check_row, reading_schema, schema_of
from storage.history.segments import CHECKED_PARQUET, COMPACT_AT, REPAIR_HINT, DamagedHistory, faulty_files, reading


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


def rows_of(home: Path, table: str) -> list[dict[str, Any]]:
    """Every row of a table of the history."""
    with reading(history_dir(home)):
        return list(open_table(home, table).to_table().to_pylist())


def open_table(home: Path, table: str) -> Dataset:
    """The files of a table; raises DamagedHistory where one of them is no file."""
    try:
        return dataset(files_of(home, table), schema=reading_schema(table), format=CHECKED_PARQUET)
    except (pa.ArrowException, OSError) as error:
        message = f"{history_dir(home) / table}: cannot be opened ({type(error).__name__})"
        raise DamagedHistory(f"{message}; {REPAIR_HINT}") from error


def damaged_files(home: Path) -> Iterator[Path]:
    """Yield the files that the history needs and that are missing, changed or unreadable."""
    for table in all_tables():
        folder = history_dir(home) / table
        faulty = {str(folder / name) for name, _ in faulty_files(folder, whole=True)}
        yield from map(Path, sorted(faulty))
        for name in sorted(set(files_of(home, table)) - faulty):
            try:
                dataset([name], schema=reading_schema(table), format=CHECKED_PARQUET).to_table()
            except (pa.ArrowException, OSError, ValueError):
                yield Path(name)


def compact(home: Path, at_least: int = COMPACT_AT, *, whole: bool = False) -> dict[str, int]:
    """Merge the files of every table that has at least so many; table -> number of files merged. See segments.py."""
    return segments.compact(history_dir(home), at_least, whole=whole)


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
