"""Reads files of imported rows: JSON, JSON lines, Parquet, and text tables with any usual delimiter.

A text table may be delimited by commas, semicolons, tabs or bars (a Markdown table too), with spaces after delimiters,
in UTF-8 or UTF-16, with or without a byte order mark. The delimiter is the one that makes most known columns of the
head. Unless commas delimit cells, a number may have a decimal comma, as European spreadsheets write it; beside decimal
points or comma delimiters such a number is refused, since 1,234 could be either.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from components.contract import UserError
from components.escapes import one_line
from components.speedup.outside_columns import INDEX_NAMES, NUMBERS, column_of, is_absent, is_known

DELIMITERS = "\t;|,"
TABLES = (".csv", ".tsv", ".tab", ".txt", ".md")
_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CODECS = (
    "utf-8-sig",
    "utf-32",
    "utf-32",
    "utf-16",
    "utf-16",
)  # in the order of the marks; UTF-32's begins as UTF-16's does
_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
_DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?")
_RULE = re.compile(r":?-+:?")  # a cell of the line under a Markdown table's head


class RawRow(NamedTuple):
    """A row before its check. cells: value by header; of a JSON file it may be anything."""

    location: str
    cells: Any


def raw_rows(file: Path) -> Iterator[RawRow]:
    """The rows of one file, read according to its suffix.

    Raises:
        UserError: the file is missing, or is not what its suffix says.
    """
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    kind = file.suffix.lower()
    try:
        if kind == ".parquet":
            yield from _read_parquet(file)
        elif kind in TABLES:
            yield from _read_table(file, _read_text(file))
        elif kind == ".jsonl":
            for number, line in enumerate(_read_text(file).split("\n"), 1):
                if line.strip():
                    yield RawRow(f"{file}:{number}", _parse_json(f"{file}:{number}", line))
        elif kind == ".json":
            content = _parse_json(str(file), _read_text(file))
            rows = content.get("rows") if isinstance(content, dict) else content
            if not isinstance(rows, list):
                raise UserError(f'{file}: expected a list of rows, or {{"rows": [...]}}')
            yield from (RawRow(f"{file} row {i}", row) for i, row in enumerate(rows, 1))
        else:
            raise UserError(f"{file}: rows come as .json, .jsonl, .csv, {', '.join(TABLES[1:])} or .parquet")
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)[:200]})") from error


def _read_parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(file).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)[:200]})") from error
    yield from (RawRow(f"{file} row {i}", row) for i, row in enumerate(rows, 1))


def _read_text(file: Path) -> str:
    """The text of a file, decoded by its byte order mark; else UTF-8, or UTF-16 where every second byte is zero."""
    content = file.read_bytes()
    encoding = next((name for mark, name in zip(_MARKS, _CODECS, strict=True) if content.startswith(mark)), "utf-8")
    head = content[:400]
    if encoding == "utf-8" and head.count(0) * 3 > len(head):
        encoding = "utf-16-be" if head[0] == 0 else "utf-16-le"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().removesuffix("-SIG")
        raise UserError(f"{file}: is no {name} text (at byte {error.start}); save it as UTF-8") from error


def _parse_json(location: str, text: str) -> Any:
    """Parse JSON; a repeated key in an object is refused."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(pairs)
        if len(row) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{location}: one row tells {one_line(twice)[:60]} twice")
        return row

    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise UserError(f"{location}: not JSON ({error})") from error
    except RecursionError as error:
        raise UserError(f"{location}: not rows (lists within lists without end)") from error


def _read_table(file: Path, text: str) -> Iterator[RawRow]:
    """Rows of a text table, each with its line number; empty ones are skipped."""
    table = _split_table(text)
    head, rows = table.head, table.rows
    for number, cells in rows:
        if len(cells) > len(head):
            raise UserError(
                f"{file}:{number}: {len(cells)} cells under a head of {len(head)} columns; put a cell that holds the "
                f"delimiter {table.delimiter!r} into quotes, and delimit by semicolons beside decimal commas"
            )
        cells.extend([""] * (len(head) - len(cells)))
    keep = _columns_to_keep(file, head, rows)
    numbers = [i for i in keep if column_of(head[i]).name in NUMBERS]
    _convert_decimal_commas(file, table.delimiter, [(number, cells, i) for number, cells in rows for i in numbers])
    for number, cells in rows:
        if not all(is_absent(cells[i]) for i in keep):
            yield RawRow(f"{file}:{number}", {head[i]: cells[i] for i in keep})


class _Table(NamedTuple):
    """The cells of a text table, without empty lines. rows: (line number, cells)."""

    delimiter: str
    head: list[str]
    rows: list[tuple[int, list[str]]]


def _split_table(text: str) -> _Table:
    """Split a table into cells; bars around lines and empty cells at their ends are left out."""
    stated = re.match(r"sep=(.)\r?\n", text)  # as Excel writes it
    if stated:
        text = text[stated.end() :]
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = stated[1] if stated else _find_delimiter(first)
    is_barred = delimiter == "|" and first.lstrip().startswith("|")
    table = _Table(delimiter, [], [])
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    for line in lines:
        cells = [cell.strip() for cell in line]
        if is_barred and cells[:1] == [""]:
            del cells[0]
        if not any(cells) or (delimiter == "|" and all(_RULE.fullmatch(cell) for cell in cells if cell)):
            continue
        while not cells[-1] and len(cells) > len(table.head):
            cells.pop()
        if table.head:
            table.rows.append((lines.line_num + bool(stated), cells))
        else:
            table.head.extend(cells)
    return table


def _find_delimiter(head: str) -> str:
    """The delimiter that makes most known columns of a head; then the one that makes most columns."""

    def score(delimiter: str) -> tuple[int, int]:
        names = next(csv.reader([head], delimiter=delimiter, skipinitialspace=True), [])
        return sum(is_known(name) for name in names), len(names)

    return max(DELIMITERS, key=score)


def _columns_to_keep(file: Path, head: list[str], rows: list[tuple[int, list[str]]]) -> list[int]:
    """Indices of the columns to keep: all but the row numbers that pandas writes first."""
    keep = []
    for place, name in enumerate(head):
        cells = [cells[place] for _, cells in rows]
        if name.lower().replace(" ", "_") in INDEX_NAMES:
            if place == 0 and all(map(str.isdecimal, cells)) and len({*cells}) == len(cells):
                continue
            if not name:
                raise UserError(f"{file}: column {place + 1} has no name in the head")
        keep.append(place)
    names = [head[place] for place in keep]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{file}: two columns are called {one_line(twice)[:60]}")
    return keep


def _convert_decimal_commas(file: Path, delimiter: str, cells: list[tuple[int, list[str], int]]) -> None:
    """Turn decimal commas into points. cells: (line number, cells of the line, index) of every number."""
    commas = [(number, row, place) for number, row, place in cells if _DECIMAL_COMMA.fullmatch(row[place])]
    if not commas:
        return
    number, row, place = commas[0]
    problem = f"{file}:{number}: {row[place]} could be a decimal or a thousand"
    if delimiter == ",":
        raise UserError(f"{problem}; write numbers with a decimal point and without thousands separators")
    point = next((row[place] for _, row, place in cells if _DECIMAL_POINT.fullmatch(row[place])), None)
    if point is not None:
        raise UserError(f"{problem} beside {point}; write all numbers with the same decimal sign, without thousands")
    for _, row, place in commas:
        row[place] = row[place].replace(",", ".")
