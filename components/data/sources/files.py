"""The rows of files of every kind, one by one, each with its line; malformed rows are set aside.

JSON is read here, tables and text in tables.py, all decompressed by streams.py. No library reads the file first: the
JSON loader of `datasets` gives up on a whole file at one malformed line, and accepts wrong types silently.

A JSON array (ShareGPT and similar data sets are one of half a gigabyte) is read element by element, with only a window
of the file in memory. An element that cannot be parsed is set aside alone: reading resumes at the next "{" that opens a
line and is indented no further than the broken element, since objects further in are parts of it. Bytes that are not
UTF-8 become lone surrogates, so that only their row is refused later.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from components.contract import UserError
from components.data.settings import Documents
from components.data.sources.addresses import Place
from components.data.sources.bad_rows import (
    MAX_ROW_BYTES,
    BadFile,
    BadRow,
    SetAside,
    parse_fault,
    refuse_constant,
    refuse_utf16,
    row_too_long,
)
from components.data.sources.streams import COMPRESSIONS, open_stream, suffix_of
from components.data.sources.tables import arrow_rows, csv_rows, parquet_rows, text_rows
from components.text import as_utf8

_MAX_OBJECT_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 1 << 20
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_MARGIN: Final = 16
"""An error this close to the end of the window (in characters) may be half an escape or literal: more is read first."""
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


def json_rows(file: Place, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(line, row) of a top-level array; (number, row) of the one list in a top-level object, such as {"data": [...]}.

    Raises UserError where the file cannot be read or decompressed to its end, or is neither of the two.
    """
    with open_stream(file) as stream:
        window = _Window(file, stream)
        window.skip_blank()
        if window.peek() == "[":
            window.advance(1)
            yield from _elements(window, set_aside)
        else:
            yield from enumerate(_wrapped_list(window), start=1)


class _Window:
    """The part of a file that has been read and not parsed yet. line, column: of position `at`, from 1 and from 0."""

    def __init__(self, file: Place, stream: IO[bytes]) -> None:
        self.file, self.stream = file, stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at, self.line, self.column = "", 0, 1, 0
        self.started = self.at_end = False

    def refill(self) -> bool:
        """Read at least as much again as is unread; False at the end of the file."""
        if self.at_end:
            return False
        self.text, self.at = self.text[self.at :], 0
        raw = self.stream.read(max(_CHUNK_BYTES, len(self.text)))
        if not self.started:
            refuse_utf16(self.file, raw)
        self.started, self.at_end = True, not raw
        self.text += self.decoder.decode(raw, final=self.at_end)
        return not self.at_end

    def advance(self, position: int) -> None:
        """Move on to this position in the text."""
        self.line += self.text.count("\n", self.at, position)
        last = self.text.rfind("\n", self.at, position)
        self.column = position - last - 1 if last >= 0 else self.column + position - self.at
        self.at = position

    def skip_blank(self) -> None:
        """Move on to the next character that is not white space, or to the end."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            assert blank is not None, "it matches the empty string too"
            self.advance(blank.end())
            if self.at < len(self.text) or not self.refill():
                return

    def read_rest(self, most: int) -> str | None:
        """The rest of the file as one text; None where it is longer than this many characters."""
        pieces, size = [self.text[self.at :]], self.num_unread()
        self.text, self.at = "", 0
        while size <= most and self.refill():
            pieces.append(self.text)
            size += len(self.text)
            self.text = ""
        return "".join(pieces) if self.at_end else None

    def peek(self) -> str:
        """The next character, "" at the end."""
        return self.text[self.at : self.at + 1]

    def num_unread(self) -> int:
        """How many characters have been read and not parsed."""
        return len(self.text) - self.at


def _elements(window: _Window, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    file = str(window.file)
    window.skip_blank()
    while window.peek() != "]":
        try:
            row, end = _element(window, decoder)
        except (ValueError, RecursionError) as error:
            line, excerpt = window.line, window.text[window.at : window.at + 400]
            resumed = _next_object(window, window.column)
            fault = parse_fault(error)
            if not resumed:
                fault = BadRow(f"{fault}; what follows it cannot be read either", fault.code)
            set_aside(file, line, fault, excerpt)
            if not resumed:
                return
            continue
        yield window.line, row
        window.advance(end)
        window.skip_blank()
        if window.peek() == ",":
            window.advance(window.at + 1)
            window.skip_blank()
        elif window.peek() not in ("]", "{"):  # before an object a comma is missing, and nothing with it
            fault = BadRow("the list breaks off here", "not_json")
            set_aside(file, window.line, fault, window.text[window.at : window.at + 80])
            if not _next_object(window, window.column):
                return
    window.advance(window.at + 1)
    window.skip_blank()
    if window.peek():
        excerpt = window.text[window.at : window.at + 80]
        set_aside(file, window.line, BadRow("text after the end of the list", "not_json"), excerpt)


def _element(window: _Window, decoder: json.JSONDecoder) -> tuple[Any, int]:
    """(the element at the current position, its end); raises ValueError or RecursionError where there is none."""
    while True:
        try:
            row, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated") or error.pos >= len(window.text) - _MARGIN
            if not cut or window.at_end:
                raise
            if window.num_unread() > MAX_ROW_BYTES:
                raise row_too_long() from error
        else:
            if end < len(window.text) or window.at_end:  # a number at the end of the window may go on
                return row, end
        window.refill()


def _next_object(window: _Window, column: int) -> bool:
    """Move on to the element after a broken one, which begins at `column`; False where there is none.

    The next element is the next "{" that opens a line, is indented no further, and is neither the first of a list nor
    a field's value: in a pretty-printed file the objects inside the broken element open lines too.
    """
    before = ""  # the last character that is no white space
    while True:
        end = window.text.find("\n", window.at)
        passed = window.text[window.at : end if end >= 0 else len(window.text)].rstrip()
        before = passed[-1:] or before
        if end < 0:
            window.advance(len(window.text))
            if not window.refill():
                return False
            continue
        window.advance(end)
        window.skip_blank()
        if window.peek() == "{" and before not in ("[", ":") and window.column <= column:
            return True
        if not window.peek():
            return False


def _wrapped_list(window: _Window) -> list[Any]:
    file = window.file
    text = window.read_rest(_MAX_OBJECT_BYTES)
    if text is None:
        raise UserError(f"source: {file}: one object of more than {_MAX_OBJECT_BYTES >> 20} MiB; save it as .jsonl")
    try:
        whole = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        line = window.line - 1 + getattr(error, "lineno", 1)
        hint = "if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else "mend the file"
        code = "nested_too_deeply" if isinstance(error, RecursionError) else "not_json"
        raise BadFile(f"source: {file}:{line}: not valid JSON ({parse_fault(error)}); {hint}", code) from error
    lists = [value for value in whole.values() if isinstance(value, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        raise UserError(f"source: {file}: expected a list of rows, or an object with exactly one list in it")
    return list(lists[0])
