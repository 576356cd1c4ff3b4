"""Rows of tables (Parquet, Arrow, CSV) and of plain text, one by one; what cannot be read is set aside with its place.

A table is read a small batch at a time, so memory follows a batch. The place of a row is its number in Parquet and
Arrow, from 1, and its line in CSV and text.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, Literal

from components.contract import UserError
from components.data.row_json import MAX_ROW_BYTES, UTF16, SetAside
from components.data.row_streams import Place, is_url, opened, raw_stream

_BATCH_ROWS: Final = 256
_ARROW_FILE: Final = b"ARROW1"
_ARROW_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""The end mark of a stream; each of its messages begins with the same four bytes, but for those of before 2019."""
Documents = Literal["file", "line", "paragraph"]
"""What one document of a text file is: all of it, each line, or what stands between empty lines."""


def parquet_rows(file: Place, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """The rows of a Parquet file; raises UserError where it cannot be read on."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with raw_stream(file) as stream, pyarrow.parquet.ParquetFile(stream if is_url(file) else file) as table:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                yield from _batch_rows(batch, number, str(file), set_aside)
                number += batch.num_rows
            if number != table.metadata.num_rows:
                raise OSError(f"its footer says {table.metadata.num_rows} rows")
    except ConnectionError:
        raise
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise UserError(
            f"source: {file}: not readable as Parquet after row {number} ({_first_line(error)}); fetch it again"
        ) from error


def arrow_rows(file: Place, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """The rows of an Arrow file: the random-access format (Feather 2) or the stream that `datasets` writes."""
    import pyarrow

    number = 0
    try:
        with raw_stream(file) as stream:
            magic = stream.read(6)
            stream.seek(0)
            source = pyarrow.PythonFile(stream, mode="r")
            batches: Iterator[Any]
            if magic == _ARROW_FILE:
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(source))
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from _batch_rows(batch.slice(start, _BATCH_ROWS), number + start, str(file), set_aside)
                number += batch.num_rows
            if magic != _ARROW_FILE and (broken := _breaks_off(stream, magic)):
                set_aside(str(file), number + 1, f"the stream breaks off here: {broken}", "")
    except ConnectionError:
        raise
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise UserError(
            f"source: {file}: not readable as Arrow after row {number} ({_first_line(error)}); fetch it again"
        ) from error


def _breaks_off(stream: IO[bytes], magic: bytes) -> str:
    """Why an Arrow stream that was read to its end is not whole, "" where it is.

    A zeroed piece of a file reads as an end mark, and a file that is cut between two batches as one without it.
    """
    if stream.read(1):
        return "more follows its end mark"
    stream.seek(-len(_ARROW_END), 2)
    return "" if not magic.startswith(_ARROW_END[:4]) or stream.read() == _ARROW_END else "it has no end mark"


def _batch_rows(batch: Any, before: int, file: str, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    try:
        batch.validate(full=True)  # offsets that lead out of a buffer would end this process
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # one of them holds text that is not UTF-8, or a date beyond Python's
        rows = None
    if rows is not None:
        yield from enumerate(rows, start=before + 1)
        return
    for place in range(batch.num_rows):
        try:
            one = batch.slice(place, 1)
            one.validate(full=True)
            row = one.to_pylist()[0]
        except (ValueError, OverflowError) as error:
            set_aside(file, before + place + 1, _first_line(error), "")
            continue
        yield before + place + 1, row


def csv_rows(where: str, stream: IO[bytes], set_aside: SetAside) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows under the column names of the first; a tab separates them where the name ends in .tsv.

    where: what messages call it. Bytes that are not UTF-8 become lone surrogates, which cost their row alone; raises
    UserError where the file is UTF-16.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    separator = "\t" if ".tsv" in where[-9:].lower() else ","
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _cells(where, _Records(text, separator), set_aside)
    finally:
        text.detach()  # whoever opened the stream closes it


class _Records:
    """CSV records one by one. A quote that nothing closes takes every line after it into its record, so a record that
    is wrong costs its first line alone: `again` reads on at the second."""

    def __init__(self, text: IO[str], separator: str) -> None:
        self._text, self._separator = text, separator
        self._waiting: deque[str] = deque()
        self.lines: list[str] = []  # of the record
        self.line = 0  # the last one of the record, from 1
        self._reader = self._fresh()

    def next(self) -> list[str] | None:
        """The cells of the next record; None at the end. Raises csv.Error for what is none."""
        self.lines = []
        return next(self._reader, None)

    def again(self) -> None:
        """Read on at the second line of the record that was read last."""
        rest = self.lines[1:]
        self._waiting.extendleft(reversed(rest))
        self.line -= len(rest)
        self._reader = self._fresh()

    def _fresh(self) -> Iterator[list[str]]:
        return csv.reader(self._take(), strict=True, delimiter=self._separator)

    def _take(self) -> Iterator[str]:
        while True:
            line = self._waiting.popleft() if self._waiting else self._next_line()
            if not line:
                return
            self.lines.append(line)
            self.line += 1
            if len(line) > MAX_ROW_BYTES:
                raise csv.Error(f"longer than {MAX_ROW_BYTES >> 20} MiB")
            yield line

    def _next_line(self) -> str:
        """The next line, of too long a one only the beginning; "" at the end."""
        line = piece = self._text.readline(MAX_ROW_BYTES + 1)
        while len(piece) > MAX_ROW_BYTES and piece[-1] not in "\r\n":
            piece = self._text.readline(MAX_ROW_BYTES + 1)
        return line


def _cells(where: str, records: _Records, set_aside: SetAside) -> Iterator[tuple[int, Mapping[str, Any]]]:
    columns: list[str] | None = None
    while True:
        try:
            cells = records.next()
        except csv.Error as error:
            _broken(where, records, f"not CSV: {error}", set_aside)
            continue
        if cells is None:
            return
        if not cells:
            continue
        if columns is None:
            if cells[0].encode("utf-8", "surrogateescape").startswith(UTF16):
                raise UserError(f"source: {where}: UTF-16 text; save it as UTF-8")
            columns = cells
        elif len(cells) != len(columns):
            _broken(where, records, f"{len(cells)} cells under {len(columns)} columns", set_aside)
        else:
            yield records.line, dict(zip(columns, cells, strict=True))


def _broken(where: str, records: _Records, why: str, set_aside: SetAside) -> None:
    """Set the first line of the last record aside and read on behind it."""
    first = records.lines[0] if records.lines else ""
    records.again()
    set_aside(where, records.line, why, first.rstrip("\r\n")[:400])


def text_rows(file: Place, documents: Documents, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """{"text": ...} for each document of a text file; what is longer than a row may be is set aside."""
    with opened(file) as stream:
        begun, lines, size = 1, list[bytes](), 0
        number, whole = 0, True  # whole: the piece before ended its line
        while line := stream.readline(MAX_ROW_BYTES + 1):
            number += whole
            if number == 1 and not size and line.startswith(UTF16):
                raise UserError(f"source: {file}: UTF-16 text; save it as UTF-8")
            blank = whole and not line.strip()
            whole = line.endswith(b"\n")
            ends = (documents == "line" and whole) or (documents == "paragraph" and blank)
            if not size:
                begun = number
            size += len(line)
            if size <= MAX_ROW_BYTES:
                lines.append(line)
            if ends:
                yield from _document(str(file), begun, lines, size, set_aside)
                lines, size = [], 0
        yield from _document(str(file), begun, lines, size, set_aside)


def _document(
    file: str, line: int, lines: list[bytes], size: int, set_aside: SetAside
) -> Iterator[tuple[int, dict[str, str]]]:
    raw = b"".join(lines)
    if size > MAX_ROW_BYTES:
        set_aside(file, line, f"longer than {MAX_ROW_BYTES >> 20} MiB", raw[:400].decode("utf-8", "replace"))
    elif raw.strip():
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip("\r\n")
        except UnicodeDecodeError as error:
            shown = raw[:400].decode("utf-8", "replace")
            set_aside(file, line, f"not UTF-8 text (byte {error.start} of the document)", shown)
        else:
            yield line, {"text": text}


def _first_line(error: Exception) -> str:
    if isinstance(error, MemoryError):  # a damaged length asks for any size
        return "it asks for more memory than there is"
    return (str(error).splitlines() or [type(error).__name__])[0]
