"""Rows of tables (Parquet, Arrow, CSV) and of plain text, one by one; what cannot be read is set aside with its place.

A table is read a small batch at a time, so memory follows a batch. The place of a row is its number in Parquet and
Arrow, from 1, and its line in CSV and text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final, Literal

from components.contract import UserError
from components.data.row_json import MAX_ROW_BYTES, UTF16, SetAside
from components.data.row_streams import Place, is_url, opened, raw_stream

_BATCH_ROWS: Final = 256
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
    except ConnectionError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
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
            if magic == b"ARROW1":
                reader = pyarrow.ipc.open_file(source)
                batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                batches = iter(pyarrow.ipc.open_stream(source))
            for batch in batches:
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from _batch_rows(batch.slice(start, _BATCH_ROWS), number + start, str(file), set_aside)
                number += batch.num_rows
    except ConnectionError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"source: {file}: not readable as Arrow after row {number} ({_first_line(error)}); fetch it again"
        ) from error


def _batch_rows(batch: Any, before: int, file: str, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # one of them holds text that is not UTF-8, or a date beyond Python's
        rows = None
    if rows is not None:
        yield from enumerate(rows, start=before + 1)
        return
    for place in range(batch.num_rows):
        try:
            row = batch.slice(place, 1).to_pylist()[0]
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
        yield from _cells(where, csv.reader(text, strict=True, delimiter=separator), set_aside)
    finally:
        text.detach()  # whoever opened the stream closes it


def _cells(where: str, reader: Any, set_aside: SetAside) -> Iterator[tuple[int, Mapping[str, Any]]]:
    columns: list[str] | None = None
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            set_aside(where, reader.line_num, f"not CSV: {error}", "")
            continue  # it goes on at the next line
        if cells is None:
            return
        if not cells:
            continue
        if columns is None:
            if cells[0].encode("utf-8", "surrogateescape").startswith(UTF16):
                raise UserError(f"source: {where}: UTF-16 text; save it as UTF-8")
            columns = cells
        elif len(cells) != len(columns):
            set_aside(where, reader.line_num, f"{len(cells)} cells under {len(columns)} columns", ",".join(cells)[:400])
        else:
            yield reader.line_num, dict(zip(columns, cells, strict=True))


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
    return (str(error).splitlines() or [type(error).__name__])[0]
