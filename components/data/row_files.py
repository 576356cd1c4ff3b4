"""Rows out of JSONL, JSON and Parquet files, one by one, each with the line it stands on; wrong ones are set aside.

Every row is checked here before any library sees the file: the JSON loader of `datasets` gives up on the whole file at
one malformed line, and lets a wrong type pass without a word.
"""

from __future__ import annotations

import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from components.contract import UserError

SUFFIXES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json", ".json.gz", ".parquet")
MAX_LINE_BYTES: Final = 64 << 20
"""A longer line is not a row; it is set aside without being read into memory."""

SetAside = Callable[[str, int, str, str], None]
"""Called as (file, line, why, row) for what cannot be read."""


def find_files(source: str) -> list[Path]:
    """The files that a path or a glob pattern names, sorted; raises UserError when there is none or one is unusable."""
    known = ", ".join(SUFFIXES)
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
            if not files:
                raise UserError(f"source: {source}: no {known} file in this folder; name the folder that holds them")
        elif path.is_file():
            files = [path]
        else:
            files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        sizes = [file.stat().st_size for file in files]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"source: {source[:200]}: not a usable path ({error}); give one that can be read") from error
    if not files:
        raise UserError(
            f"source: {source}: no such file; give 'python-stdlib', a path or pattern of {known}, or hf:NAME:SPLIT"
        )
    for file, size in zip(files, sizes, strict=True):
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"source: {file}: unknown kind of file; expected one of {known}")
        if size == 0:
            raise UserError(f"source: {file}: the file is empty; remove it or fill it")
        if not os.access(file, os.R_OK):
            raise UserError(f"source: {file}: not readable by this user; change its permissions")
    return files


def stem_of(file: Path) -> str:
    """The file's name without its suffixes: "gsm8k_test" of "gsm8k_test.jsonl.gz"."""
    return printable(file.name.split(".")[0] or file.name)


def printable(name: str) -> str:
    """A file name as text that can be written as UTF-8, whatever bytes the file system holds."""
    return name.encode("utf-8", "replace").decode("utf-8")


def read_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(line, row) for each row that parses. The line of a Parquet row is its number, from 1."""
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file, set_aside)
    elif file.name.endswith((".json", ".json.gz")):
        yield from _json_rows(file, set_aside)
    else:
        yield from _jsonl_rows(file, set_aside)


def _jsonl_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    for number, raw in _lines(file):
        if not raw.strip():
            continue
        try:
            if len(raw) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES >> 20} MiB")
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(line, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            set_aside(str(file), number, _why(error), raw[:400].decode("utf-8", "replace").rstrip())
            continue
        yield number, row


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of a file that may be gzipped; of too long a line only the beginning."""
    try:
        with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                yield number, line
                while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                    line = stream.readline(MAX_LINE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
        raise UserError(f"source: {file}: cannot be read to its end ({error}); fetch the file again") from error


def _json_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """The elements of a top-level array; or of the one list in a top-level object, such as {"data": [...]}."""
    text = _whole_text(file)
    begin = len(text) - len(text.lstrip())
    if text[begin : begin + 1] != "[":
        rows = _wrapped_list(file, text)
        yield from enumerate(rows, start=1)
        return
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    at, line, counted = _skip(text, begin + 1), 1, 0
    while text[at : at + 1] != "]":
        line += text.count("\n", counted, at)
        counted = at
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            resumed = _next_object(text, at)
            why = _why(error) + ("" if resumed is not None else "; what follows it cannot be read either")
            set_aside(str(file), line, why, text[at : at + 400])
            if resumed is None:
                return
            at = resumed
            continue
        yield line, row
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
        elif text[at : at + 1] != "]":
            set_aside(str(file), line + text.count("\n", counted, at), "the list breaks off here", text[at : at + 80])
            return
    after = _skip(text, at + 1)
    if after < len(text):
        line += text.count("\n", counted, after)
        set_aside(str(file), line, "text after the end of the list", text[after : after + 80])


def _whole_text(file: Path) -> str:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else file.read_bytes()
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"source: {file}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"source: {file}: cannot be read to its end ({error}); fetch the file again") from error


def _next_object(text: str, broken: int) -> int | None:
    """Where the element after a broken one begins: the next "{" that opens a line after a comma, or None."""
    at = broken
    while (end := text.find("\n", at)) >= 0:
        at = _skip(text, end)
        before = end - 1
        while before > broken and text[before] in " \t\r\n":
            before -= 1
        if text[at : at + 1] == "{" and text[before] == ",":
            return at
    return None


def _wrapped_list(file: Path, text: str) -> list[Any]:
    try:
        whole = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        hint = "if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else "mend the file"
        raise UserError(f"source: {file}:{line}: not valid JSON ({_why(error)}); {hint}") from error
    lists = [value for value in whole.values() if isinstance(value, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        raise UserError(f"source: {file}: expected a list of rows, or an object with exactly one list in it")
    return list(lists[0])


def _parquet_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for place in range(batch.num_rows):
                    number += 1
                    try:
                        row = batch.slice(place, 1).to_pylist()[0]
                    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date beyond Python's
                        set_aside(str(file), number, _first_line(error), "")
                        continue
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"source: {file}: not readable as Parquet after row {number} ({_first_line(error)}); fetch it again"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start} of the line)"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)
