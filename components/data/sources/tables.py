"""Rows of tables (Parquet, Arrow, CSV, data sets) and of text, one by one; unreadable ones are set aside by place.

Tables are read in small batches, which bound the memory. The place of a row is its number in Parquet and Arrow, from 1,
and its line in CSV and text.

A data set in Hugging Face format, on the hub or in a local folder, is streamed through `datasets`: only data that are
read are downloaded, media columns are not decoded, and code that comes with a data set is never run. `datasets` reads
JSON in blocks and stops at the first malformed line; the same file given by its path loses only that line.
"""

from __future__ import annotations

import csv
import io
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO, Any, Final

import pyarrow
import pyarrow.parquet
from huggingface_hub import is_offline_mode

from components.contract import UserError
from components.data.settings import Documents
from components.data.sources.addresses import HubSource, Place, is_url, source_files
from components.data.sources.bad_rows import MAX_ROW_BYTES, BadRow, Row, SetAside, refuse_utf16, row_too_long
from components.data.sources.streams import open_stream, raw_stream
from components.text import message_of

_BATCH_ROWS: Final = 256
_ARROW_FILE: Final = b"ARROW1"
_ARROW_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""The end mark of an Arrow stream; since 2019 each of its messages begins with the same four bytes."""


def parquet_rows(file: Place, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(number, row) of a Parquet file; raises UserError where it cannot be read further."""
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
            f"source: {file}: not readable as Parquet after row {number} ({_error_line(error)}); fetch it again"
        ) from error


def arrow_rows(file: Place, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(number, row) of an Arrow file: the random-access format (Feather 2) or the stream that `datasets` writes."""
    number = 0
    try:
        with raw_stream(file) as stream:
            magic = stream.read(6)
            stream.seek(0)
            for batch in arrow_batches(pyarrow.PythonFile(stream, mode="r")):
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from _batch_rows(batch.slice(start, _BATCH_ROWS), number + start, str(file), set_aside)
                number += batch.num_rows
            if magic != _ARROW_FILE and (fault := _truncation(stream, magic)):
                message = f"the stream breaks off here: {fault}"
                set_aside(str(file), number + 1, BadRow(message, "unreadable"), "")
    except ConnectionError:
        raise
    except (pyarrow.ArrowException, OSError, MemoryError) as error:
        raise UserError(
            f"source: {file}: not readable as Arrow after row {number} ({_error_line(error)}); fetch it again"
        ) from error


def arrow_batches(file: pyarrow.NativeFile) -> Iterator[pyarrow.RecordBatch]:
    """The batches of an Arrow file of either format: random access or stream."""
    is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    file.seek(0)
    if is_file:
        reader = pyarrow.ipc.open_file(file)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pyarrow.ipc.open_stream(file)


def _truncation(stream: IO[bytes], magic: bytes) -> str:
    """How an Arrow stream that was read to its end is incomplete, "" where it is complete.

    A zeroed part of a file reads as an end mark; a file that was cut between two batches has no end mark.
    """
    if stream.read(1):
        return "more follows its end mark"
    stream.seek(-len(_ARROW_END), 2)
    return "" if not magic.startswith(_ARROW_END[:4]) or stream.read() == _ARROW_END else "it has no end mark"


def _batch_rows(batch: Any, num_before: int, file: str, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    try:
        batch.validate(full=True)  # offsets that lead out of a buffer would end this process
        rows = batch.to_pylist()
    except (ValueError, OverflowError):  # a row holds text that is not UTF-8, or a date beyond Python's
        rows = None
    if rows is not None:
        yield from enumerate(rows, start=num_before + 1)
        return
    for place in range(batch.num_rows):
        try:
            single = batch.slice(place, 1)
            single.validate(full=True)
            row = single.to_pylist()[0]
        except (ValueError, OverflowError) as error:
            set_aside(file, num_before + place + 1, BadRow(_error_line(error), "unreadable"), "")
            continue
        yield num_before + place + 1, row


def csv_rows(location: str, stream: IO[bytes], set_aside: SetAside) -> Iterator[tuple[int, Row]]:
    """(line, row by column name) of CSV whose first record names the columns; separated by tabs for names in .tsv.

    location: the file's name in messages. Bytes that are not UTF-8 become lone surrogates; raises UserError for UTF-16.
    """
    csv.field_size_limit(MAX_ROW_BYTES)
    separator = "\t" if ".tsv" in location[-9:].lower() else ","
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _read_records(location, _Records(text, separator), set_aside)
    finally:
        text.detach()  # whoever opened the stream closes it


class _RecordTooLong(csv.Error):
    """A line of a record is longer than MAX_ROW_BYTES."""


class _Records:
    """CSV records one by one. An unclosed quote takes every later line into its record, so only the first line of a
    broken record is dropped: `resume_at_second_line` reads on behind it."""

    def __init__(self, text: IO[str], separator: str) -> None:
        self._text, self._separator = text, separator
        self._pushed_back: deque[str] = deque()
        self.lines: list[str] = []  # of the record
        self.line = 0  # number of the record's last line, from 1
        self._reader = self._new_reader()

    def next(self) -> list[str] | None:
        """The cells of the next record, None at the end; raises csv.Error for a broken one."""
        self.lines = []
        return next(self._reader, None)

    def resume_at_second_line(self) -> None:
        """Continue at the second line of the record that was read last."""
        rest = self.lines[1:]
        self._pushed_back.extendleft(reversed(rest))
        self.line -= len(rest)
        self._reader = self._new_reader()

    def _new_reader(self) -> Iterator[list[str]]:
        return csv.reader(self._read_lines(), strict=True, delimiter=self._separator)

    def _read_lines(self) -> Iterator[str]:
        while True:
            line = self._pushed_back.popleft() if self._pushed_back else self._next_line()
            if not line:
                return
            self.lines.append(line)
            self.line += 1
            if len(line) > MAX_ROW_BYTES:
                raise _RecordTooLong(row_too_long())
            yield line

    def _next_line(self) -> str:
        """The next line, cut where it is too long; "" at the end."""
        line = piece = self._text.readline(MAX_ROW_BYTES + 1)
        while len(piece) > MAX_ROW_BYTES and piece[-1] not in "\r\n":
            piece = self._text.readline(MAX_ROW_BYTES + 1)
        return line


def _read_records(location: str, records: _Records, set_aside: SetAside) -> Iterator[tuple[int, Row]]:
    columns: list[str] | None = None
    while True:
        try:
            cells = records.next()
        except csv.Error as error:
            code = "too_long_a_row" if isinstance(error, _RecordTooLong) else "not_csv"
            _set_first_line_aside(location, records, BadRow(f"not CSV: {error}", code), set_aside)
            continue
        if cells is None:
            return
        if not cells:
            continue
        if columns is None:
            refuse_utf16(location, cells[0].encode("utf-8", "surrogateescape"))
            columns = cells
        elif len(cells) != len(columns):
            fault = BadRow(f"{len(cells)} cells under {len(columns)} columns", "not_csv")
            _set_first_line_aside(location, records, fault, set_aside)
        else:
            yield records.line, dict(zip(columns, cells, strict=True))


def _set_first_line_aside(location: str, records: _Records, fault: BadRow, set_aside: SetAside) -> None:
    """Set the first line of the last record aside and continue behind it."""
    first = records.lines[0] if records.lines else ""
    records.resume_at_second_line()
    set_aside(location, records.line, fault, first.rstrip("\r\n")[:400])


def text_rows(file: Place, documents: Documents, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(line, {"text": ...}) for each document of a text file; documents of more than MAX_ROW_BYTES are set aside."""
    with open_stream(file) as stream:
        first_line, lines, size = 1, list[bytes](), 0
        number, whole = 0, True  # whole: the piece before this one ended its line
        while line := stream.readline(MAX_ROW_BYTES + 1):
            number += whole
            if number == 1 and not size:
                refuse_utf16(file, line)
            blank = whole and not line.strip()
            whole = line.endswith(b"\n")
            is_end = (documents == "line" and whole) or (documents == "paragraph" and blank)
            if not size:
                first_line = number
            size += len(line)
            if size <= MAX_ROW_BYTES:
                lines.append(line)
            if is_end:
                yield from _read_document(str(file), first_line, lines, size, set_aside)
                lines, size = [], 0
        yield from _read_document(str(file), first_line, lines, size, set_aside)


def _read_document(
    file: str, line: int, lines: list[bytes], size: int, set_aside: SetAside
) -> Iterator[tuple[int, dict[str, str]]]:
    raw = b"".join(lines)
    if size > MAX_ROW_BYTES:
        set_aside(file, line, row_too_long(), raw[:400].decode("utf-8", "replace"))
    elif raw.strip():
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip("\r\n")
        except UnicodeDecodeError as error:
            excerpt = raw[:400].decode("utf-8", "replace")
            fault = BadRow(f"not UTF-8 text (byte {error.start} of the document)", "not_utf8")
            set_aside(file, line, fault, excerpt)
        else:
            yield line, {"text": text}


def _error_line(error: Exception) -> str:
    if isinstance(error, MemoryError):  # a damaged length asks for any size
        return "it asks for more memory than there is"
    return (str(error).splitlines() or [type(error).__name__])[0]


def hub_rows(source: HubSource) -> Iterator[tuple[int, Any]]:
    """(number, row) for each row of the split, from 1; raises UserError in one line when it cannot be read."""
    number = 0
    try:
        for row in _open_rows(source):
            number += 1
            yield number, row
    except UserError:
        raise
    except Exception as error:  # every network, hub and format failure becomes one line
        reason = message_of(error)
        raise UserError(f"source: {source.source}: {_remedy(source, number, reason)}") from error


def _open_rows(source: HubSource) -> Any:
    import datasets  # it takes a second, and few sources are data sets of the hub

    datasets.disable_progress_bars()  # a run shows its own
    datasets.utils.tqdm.set_lock(threading.RLock())  # the default is shared and outlives a step's process

    _check_arrow_files(source)
    if source.folder is not None and any(
        (source.folder / name).is_file() for name in ("state.json", "dataset_dict.json")
    ):
        saved = datasets.load_from_disk(str(source.folder))  # Arrow files, mapped into memory
        splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
        if source.split not in splits:
            raise ValueError(f"no split {source.split}; it has {', '.join(sorted(splits))}")
        return splits[source.split].to_iterable_dataset().decode(False)
    place = str(source.folder.resolve()) if source.folder is not None else source.name
    rows = datasets.load_dataset(
        place, name=source.config, revision=source.revision, split=source.split, streaming=True
    )
    return rows.decode(False)


def _check_arrow_files(source: HubSource) -> None:
    """Raise ValueError for a local Arrow file whose offsets point outside its buffers.

    `datasets` maps such files into memory and follows the offsets, which ends the process.
    """
    for file in source_files(source):
        if file.suffix != ".arrow" or not file.stat().st_size:
            continue
        try:
            with pyarrow.memory_map(str(file)) as mapped:
                for batch in arrow_batches(mapped):
                    batch.validate(full=True)
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            raise ValueError(f"{file.name}: {error or type(error).__name__}") from error


def _remedy(source: HubSource, number: int, reason: str) -> str:
    if number:
        return f"reading stopped after row {number} ({reason}); mend that file, or give its path as source"
    if source.folder is not None:
        return f"`datasets` cannot read it ({reason}); mend it, or give the path of its files as source"
    if is_offline_mode():
        return "steps may not reach the hub; allow it with `draftsmith run --online`, or name a local folder"
    return f"the hub did not give it ({reason}); check the name and the connection, or name a local folder"
