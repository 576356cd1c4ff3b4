"""The typed schema of every table, derived from its row dataclass and enforced on every row that is written.

One file whose column has drifted to text would turn that column into text for every reader, so a row must have exactly
the columns and types of its dataclass. A column that was added later has a default: rows written before it take the
default here, and Parquet files written before it read as NULL.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, get_args, get_origin

import pyarrow as pa

from components.contract import UserError
from storage.history.records import MEASURED, RECORDS, columns_of

_ARROW: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us"),
    list[int]: pa.list_(pa.int64()),
    list[str]: pa.list_(pa.string()),
    list[float]: pa.list_(pa.float64()),
    list[list[float]]: pa.list_(pa.list_(pa.float64())),
}


def all_tables() -> list[str]:
    """Every table of the history."""
    return [*MEASURED, *RECORDS]


def plain_type(hint: Any) -> tuple[Any, bool]:
    """(the type without None, whether it may be None) of a column's type hint."""
    if get_origin(hint) is types.UnionType:
        inner = [part for part in get_args(hint) if part is not type(None)]
        assert len(inner) == 1, f"a column has one type, not {hint}"
        return inner[0], True
    return hint, False


def schema_of(table: str) -> pa.Schema:
    """The Parquet schema of a table, as it is written."""
    fields = []
    for name, hint in columns_of(table).items():
        kind, nullable = plain_type(hint)
        fields.append(pa.field(name, _ARROW[kind], nullable=nullable))
    return pa.schema(fields)


def reading_schema(table: str) -> pa.Schema:
    """The schema that readers see: any column may be absent from files older than it."""
    return pa.schema([field.with_nullable(True) for field in schema_of(table)])


@cache
def defaults_of(table: str) -> dict[str, Any]:
    """Column -> default, of the columns that older rows lack."""
    row_type = RECORDS.get(table) or MEASURED[table]
    missing = dataclasses.MISSING
    return {field.name: field.default for field in dataclasses.fields(row_type) if field.default is not missing} | {
        field.name: field.default_factory()
        for field in dataclasses.fields(row_type)
        if field.default_factory is not missing
    }


def check_row(table: str, row: Mapping[str, Any], columns: Mapping[str, Any], location: str) -> dict[str, Any]:
    """The row, once every value is checked to be of its column's exact type. location: its name in errors.

    Integers are accepted where a float is meant. NaN and infinity are refused: what was not measured is None.

    Raises:
        UserError: an unknown or missing column, a wrong type, or an absent value in a column that needs one.
    """
    row = {**defaults_of(table), **row}
    unknown, missing = row.keys() - columns.keys(), columns.keys() - row.keys()
    if unknown or missing:
        faults = [f"unknown column {name}" for name in sorted(unknown)] + [
            f"no column {name}" for name in sorted(missing)
        ]
        raise UserError(f"{location}: {table} has {', '.join(faults)}; its columns stand in components/rows.py")
    return {name: _check_value(row[name], hint, f"{location}: {table}.{name}") for name, hint in columns.items()}


def _check_value(value: Any, hint: Any, location: str) -> Any:
    kind, nullable = plain_type(hint)
    if value is None:
        if not nullable:
            raise UserError(f"{location} is empty, but this column always has a value ({kind.__name__})")
        return None
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise UserError(f"{location} is {value!r}, expected a list")
        return [_check_value(item, get_args(kind)[0], location) for item in value]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{location} is {value!r} ({type(value).__name__}), expected {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise UserError(f"{location} is {value}; write None for what was not measured")
    if kind is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{location} is {value}, which does not fit 64 bits")
    return value
