"""The rows of files of every kind, one by one, each with its line; malformed rows are set aside.

JSONL is read here, JSON arrays in json_array.py, tables and text in tables.py, all decompressed by streams.py.
No library reads the file first: the JSON loader of `datasets` gives up on a whole file at one malformed line, and
accepts wrong types silently.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.contract import UserError
from components.data.sources.json_array import MAX_ROW_BYTES as MAX_ROW_BYTES
from components.data.sources.json_array import UTF16, describe_fault, json_rows, no_constant
from components.data.sources.json_array import SetAside as SetAside
from components.data.sources.streams import COMPRESSIONS, Place, open_stream, suffix_of
from components.data.sources.tables import Documents, arrow_rows, csv_rows, parquet_rows, text_rows

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


def find_files(source: str) -> list[Path]:
    """The files that a path or a glob pattern names, sorted; raises UserError when there is none or one is unusable."""
    kinds, root = ", ".join(SUFFIXES), None
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            root = path
            files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
            if not files:
                raise UserError(f"source: {source}: no {kinds} file in this folder; name the folder that holds them")
        elif path.is_file():
            files = [path]
        else:
            files, root = sorted(files_of_pattern(str(path))), folder_of_pattern(source)
        sizes = [file.stat().st_size for file in files]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"source: {source[:200]}: not a usable path ({error}); give one that can be read") from error
    if not files:
        raise UserError(
            f"source: {source}: no such file; give 'python-stdlib', a path or pattern of {kinds}, or hf:NAME:SPLIT"
        )
    for file, size in zip(files, sizes, strict=True):
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"source: {file}: unknown kind of file; expected one of {kinds}")
        require_usable(file, size, root)
    return files


def require_usable(file: Path, size: int, root: Path | None) -> None:
    """Raise UserError where a file is empty, unreadable, or a link out of the folder it was found in (`root`)."""
    if root is not None and leads_out(file, root):
        raise UserError(f"source: {file}: is a link that leads out of {root}; name the file that it leads to")
    if size == 0:
        raise UserError(f"source: {file}: the file is empty; remove it or fill it")
    if not os.access(file, os.R_OK):
        raise UserError(f"source: {file}: not readable by this user; change its permissions")


def files_of_pattern(pattern: str) -> list[Path]:
    """The files that match a glob pattern."""
    return [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]


def folder_of_pattern(source: str) -> Path:
    """The folder of a glob pattern: the part before its first wild card."""
    wild = min((source.find(sign) for sign in "*?[" if sign in source), default=len(source))
    return Path(os.path.dirname(source[:wild]) or ".").expanduser()


def leads_out(file: Path, root: Path) -> bool:
    """Whether a file below a folder is a link out of it: whoever writes there could have any file read."""
    return not file.resolve().is_relative_to(root.resolve())


def stem_of(file: Path) -> str:
    """The file's name without its suffixes: "gsm8k_test" of "gsm8k_test.jsonl.gz"."""
    return printable(file.name.split(".")[0] or file.name)


def printable(name: str) -> str:
    """A file name as text that can be encoded as UTF-8, whatever its bytes."""
    return name.encode("utf-8", "replace").decode("utf-8")


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
                raise ValueError(f"longer than {MAX_ROW_BYTES >> 20} MiB")
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(line, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            set_aside(str(file), number, describe_fault(error), raw[:400].decode("utf-8", "replace").rstrip())
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
            if number == 1 and line.startswith(UTF16):
                raise UserError(f"source: {file}: UTF-16 text; save it as UTF-8")
            yield number, line
            while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                line = stream.readline(MAX_ROW_BYTES + 1)
                at += len(line)
