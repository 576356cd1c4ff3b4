"""The history: one immutable, typed Parquet file for each (table, key), written and read by any number of processes.

history/TABLE/KEY.parquet is written under a temporary name and renamed, so a reader never sees half a file, and nothing
holds a lock. The schema comes from the row dataclasses and is enforced on write, since one file whose column has
drifted to text would turn that column into text for every reader. Past a few hundred files a table becomes one file.
Everything here can be deleted and rebuilt from the store, the run journals and the promotion log.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, get_args, get_origin

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.contract import UserError
from components.rows import TABLES
from storage.records import MEASURED, RECORDS, Provenance, columns_of

COMPACT_AT = 300  # files in a table; 1,000 files take 0.2 s to scan, one file of the same rows 0.02 s

_ARROW: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us"),
    list[int]: pa.list_(pa.int64()),
    list[str]: pa.list_(pa.string()),
    list[float]: pa.list_(pa.float64()),
}


def history_dir(home: Path) -> Path:
    """Where the Parquet files of one home live."""
    return home / "history"


def all_tables() -> list[str]:
    """Every table of the history."""
    return [*MEASURED, *RECORDS]


def plain_type(hint: Any) -> tuple[Any, bool]:
    """(type without None, may it be None?) of a column's type hint."""
    if get_origin(hint) is types.UnionType:
        inner = [part for part in get_args(hint) if part is not type(None)]
        assert len(inner) == 1, f"a column has one type, not {hint}"
        return inner[0], True
    return hint, False


def schema_of(table: str) -> pa.Schema:
    """The Parquet schema of a table, derived from its dataclass."""
    fields = []
    for name, hint in columns_of(table).items():
        kind, nullable = plain_type(hint)
        fields.append(pa.field(name, _ARROW[kind], nullable=nullable))
    return pa.schema(fields)


def checked(table: str, row: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row with every value of its column's exact type; anything else is refused.

    Integers are accepted where a float is meant. NaN and infinity are refused: what was not measured is None.

    Raises:
        UserError: an unknown or missing column, a wrong type, or an absent value in a column that needs one.
    """
    unknown, missing = row.keys() - columns.keys(), columns.keys() - row.keys()
    if unknown or missing:
        what = [f"unknown column {name}" for name in sorted(unknown)] + [
            f"no column {name}" for name in sorted(missing)
        ]
        raise UserError(f"{where}: {table} has {', '.join(what)}; its columns stand in components/rows.py")
    return {name: _checked_value(row[name], hint, f"{where}: {table}.{name}") for name, hint in columns.items()}


def _checked_value(value: Any, hint: Any, where: str) -> Any:
    kind, nullable = plain_type(hint)
    if value is None:
        if not nullable:
            raise UserError(f"{where} is empty, but this column always has a value ({kind.__name__})")
        return None
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise UserError(f"{where} is {value!r}, expected a list")
        return [_checked_value(item, get_args(kind)[0], where) for item in value]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{where} is {value!r} ({type(value).__name__}), expected {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{where} is {value}; write None for what was not measured")
    if kind is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{where} is {value}, which does not fit 64 bits")
    return value


def write_table(
    home: Path, table: str, key: str, rows: Iterable[Mapping[str, Any]], where: str, *, replace: bool = False
) -> None:
    """Write the rows of one (table, key) as one Parquet file, or do nothing when it is there already.

    replace: a step that was forced to run again has made this key anew; its file is replaced whole.
    """
    assert key and not key.startswith("_") and "/" not in key, f"not a file name: {key!r}"
    directory = history_dir(home) / table
    if _is_known(directory, key):
        if not replace:
            return
        _forget_compacted(directory, table, key)
    columns = columns_of(table)
    checked_rows = [checked(table, row, columns, f"{where} row {i}") for i, row in enumerate(rows, 1)]
    _seed(directory, table)
    _write_parquet(directory / f"{key}.parquet", pa.Table.from_pylist(checked_rows, schema=schema_of(table)))


def write_record(home: Path, table: str, key: str, rows: Sequence[Any], *, replace: bool = False) -> None:
    """Write rows of storage's own tables (storage/records.py)."""
    write_table(home, table, key, [dataclasses.asdict(row) for row in rows], where=key, replace=replace)


def write_measured(home: Path, directory: Path, provenance: Provenance, *, replace: bool = False) -> None:
    """Write every `TABLE.jsonl` of an artifact's directory into the history, with where it comes from.

    Raises:
        UserError: a file is not JSON lines, or a row does not have the columns and types of components/rows.py.
    """
    known = dataclasses.asdict(provenance)
    for table in TABLES:
        source = directory / f"{table}.jsonl"
        if source.is_file() and (replace or not _is_known(history_dir(home) / table, provenance.artifact_key)):
            rows = ({**row, **known} for row in _json_rows(source))
            where = f"{provenance.step} {source.name}"
            write_table(home, table, provenance.artifact_key, rows, where=where, replace=replace)


def is_known(home: Path, table: str, key: str) -> bool:
    """The rows of this key are in the history."""
    return _is_known(history_dir(home) / table, key)


def seed(home: Path) -> None:
    """Give every table an empty typed file, so that views work before the first row."""
    for table in all_tables():
        _seed(history_dir(home) / table, table)


def files_of(home: Path, table: str) -> list[str]:
    """The files that hold a table's rows now: the compacted one and those written since."""
    directory = history_dir(home) / table
    manifest = _manifest(directory)
    covered = set(manifest["covers"])
    fresh = [path for path in directory.glob("*.parquet") if not path.name.startswith("_") and path.stem not in covered]
    compacted = [directory / manifest["file"]] if manifest["file"] else []
    return [str(path) for path in [directory / "_schema.parquet", *compacted, *sorted(fresh)]]


def compact(home: Path, at_least: int = COMPACT_AT) -> dict[str, int]:
    """Merge the files of every table that has many; table -> number of files merged. Safe while others read and write.

    The merged file is written first, then the manifest that names it is swapped in. Files it replaces stay until the
    next compaction of the table, so a reader that has just listed them still finds them.
    """
    merged: dict[str, int] = {}
    for table in all_tables():
        directory = history_dir(home) / table
        if not directory.is_dir():
            continue
        with _only_compactor(directory):
            old = _manifest(directory)
            covered = set(old["covers"])
            names = {path.stem for path in directory.glob("*.parquet") if not path.name.startswith("_")}
            fresh = sorted(names - covered)
            if len(fresh) < at_least:
                continue
            sources = ([old["file"]] if old["file"] else []) + [f"{name}.parquet" for name in fresh]
            whole = pa.concat_tables(_typed(directory / name, table) for name in sources)
            covers = sorted(covered | set(fresh))
            name = f"_compact-{uuid.uuid4().hex[:16]}.parquet"
            _write_parquet(directory / name, whole)
            _write_text(
                directory / "_manifest.json", json.dumps({"file": name, "before": old["file"], "covers": covers})
            )
            stale = [f"{stem}.parquet" for stem in names & covered] + ([old["before"]] if old.get("before") else [])
            for leftover in stale:  # replaced by the compaction before this one: no reader lists them any more
                (directory / leftover).unlink(missing_ok=True)
            merged[table] = len(fresh)
    return merged


def _forget_compacted(directory: Path, table: str, key: str) -> None:
    """Take the rows of one artifact out of the compacted file, if they are there, before it is written anew."""
    with _only_compactor(directory):
        old = _manifest(directory)
        if key not in old["covers"]:
            return
        (directory / f"{key}.parquet").unlink(missing_ok=True)
        whole = _typed(directory / old["file"], table)
        rest = whole.filter(pc.not_equal(whole["artifact_key"], key))
        covers = [other for other in old["covers"] if other != key]
        name = f"_compact-{uuid.uuid4().hex[:16]}.parquet"
        _write_parquet(directory / name, rest)
        _write_text(directory / "_manifest.json", json.dumps({"file": name, "before": old["file"], "covers": covers}))


def _typed(path: Path, table: str) -> pa.Table:
    """A file's rows under the present schema: columns added since are empty, columns dropped since are left out."""
    found, schema = pq.read_table(path), schema_of(table)
    arrays = [
        found[field.name].cast(field.type) if field.name in found.column_names else pa.nulls(len(found), field.type)
        for field in schema
    ]
    return pa.table(arrays, schema=pa.schema([field.with_nullable(True) for field in schema]))


def _is_known(directory: Path, key: str) -> bool:
    return (directory / f"{key}.parquet").is_file() or key in _manifest(directory)["covers"]


def _manifest(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / "_manifest.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"file": None, "before": None, "covers": []}


def _seed(directory: Path, table: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path, schema = directory / "_schema.parquet", schema_of(table)
    if not path.is_file() or not pq.read_schema(path).equals(schema):
        _write_parquet(path, schema.empty_table())


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


def _write_parquet(path: Path, rows: pa.Table) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    pq.write_table(rows, part, compression="zstd")
    os.replace(part, path)


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


@contextmanager
def _only_compactor(directory: Path) -> Iterator[None]:
    """Hold the right to compact a table; writers and readers need no lock."""
    with (directory / ".compact.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
