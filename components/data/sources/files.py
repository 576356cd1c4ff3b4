"""The rows of files of every kind, one by one, each with its line; malformed rows are set aside.

JSONL is read here, JSON arrays in json_array.py, tables and text in tables.py, all decompressed by streams.py.
No library reads the file first: the JSON loader of `datasets` gives up on a whole file at one malformed line, and
accepts wrong types silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.data.settings import Documents
from components.data.sources.addresses import Place
from components.data.sources.bad_rows import (
    MAX_ROW_BYTES,
    SetAside,
    parse_fault,
    refuse_constant,
    refuse_utf16,
    row_too_long,
)
from components.data.sources.json_array import json_rows
from components.data.sources.streams import COMPRESSIONS, open_stream, suffix_of
from components.data.sources.tables import arrow_rows, csv_rows, parquet_rows, text_rows
from components.text import as_utf8

_ARROW: Final = (".arrow", ".feather", ".ipc")
_CSV: Final = (".csv", ".tsv")
TEXT_SUFFIXES: Final = (".txt", ".text", ".md")
SUFFIXES: Final = (
    *(f"{kind}{compression}" for kind in (".jsonl", ".ndjson", ".json") for compression in ("", *COMPRESSIONS)),
    ".parquet",
    *_ARROW,
)
"""Suffixes of the files that every step reads; chats may also be CSV and text."""
TABLE_SUFFIXES: Final = (*SUFFIXES, *(f"{kind}{compression}" for kind in _CSV for compression in ("", *COMPRESSIONS)))


def stem_of(file: Path) -> str:
    """The file's name without its suffixes: "gsm8k_test" of "gsm8k_test.jsonl.gz"."""
    return as_utf8(file.name.split(".")[0] or file.name)


def read_rows(
    file: Place, set_aside: SetAside, *, kind: str = "", documents: Documents = "file", span: Span | None = None
) -> Iterator[tuple[int, Any]]:
    """(line, row) for each row that parses. The line of a Parquet row is its number, from 1.

    kind: the format, such as ".jsonl"; empty takes the suffix of the file. documents: what a row of a text file is.
    span: the part of an uncompressed JSONL file to read, from `cut_lines`; None reads all of it.
    Raises UserError, also half-way, where the file cannot be read further.
    """
    kind = kind or suffix_of(str(file))
    if kind == ".parquet":
        yield from parquet_rows(file, set_aside)
    elif kind in _ARROW:
        yield from arrow_rows(file, set_aside)
    elif kind == ".json":
        yield from json_rows(file, set_aside)
    elif kind in _CSV:
        with open_stream(file) as stream:
            yield from csv_rows(str(file), stream, set_aside)
    elif kind in TEXT_SUFFIXES:
        yield from text_rows(file, documents, set_aside)
    else:
        yield from _jsonl_rows(file, set_aside, span)


@dataclass(frozen=True)
class Span:
    """Whole lines of a file: bytes `start` to `stop`; `line` is the number of its first line, from 1."""

    start: int
    stop: int
    line: int


def cut_lines(file: Path, size: int) -> list[Span]:
    """Spans that cover the file, of at least `size` bytes each except the last."""
    spans: list[Span] = []
    start, line, at, newlines = 0, 1, 0, 0  # newlines: read so far in the current span
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            counted_to = 0
            while (end := block.find(b"\n", max(counted_to, start + size - 1 - at))) >= 0:
                newlines += block.count(b"\n", counted_to, end + 1)
                spans.append(Span(start, at + end + 1, line))
                start, line, newlines, counted_to = at + end + 1, line + newlines, 0, end + 1
            newlines += block.count(b"\n", counted_to)
            at += len(block)
    return [*spans, Span(start, at, line)] if at > start else spans


def _jsonl_rows(file: Place, set_aside: SetAside, span: Span | None) -> Iterator[tuple[int, Any]]:
    for number, raw in _lines(file, span):
        if not raw.strip():
            continue
        try:
            if len(raw) > MAX_ROW_BYTES:
                raise row_too_long()
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(line, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            set_aside(str(file), number, parse_fault(error), raw[:400].decode("utf-8", "replace").rstrip())
            continue
        yield number, row


def _lines(file: Place, span: Span | None) -> Iterator[tuple[int, bytes]]:
    """(number, line) of a file; a line that is too long is cut."""
    with open_stream(file) as stream:
        number = at = 0
        if span is not None:
            number, at = span.line - 1, stream.seek(span.start)
        while (span is None or at < span.stop) and (line := stream.readline(MAX_ROW_BYTES + 1)):
            number += 1
            at += len(line)
            if number == 1:
                refuse_utf16(file, line)
            yield number, line
            while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                line = stream.readline(MAX_ROW_BYTES + 1)
                at += len(line)
