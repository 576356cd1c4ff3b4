"""Rows out of JSONL, JSON and Parquet files, one by one, each with the line it stands on; wrong ones are set aside.

Every row is checked here before any library sees the file: the JSON loader of `datasets` gives up on the whole file at
one malformed line, and lets a wrong type pass without a word.
"""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from components.contract import UserError

SUFFIXES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".json", ".parquet")
SetAside = Callable[[str, int, str, str], None]
"""Called as (file, line, why, row) for what cannot be read."""


def find_files(source: str) -> list[Path]:
    """The files that a path or a glob pattern names, sorted; raises UserError when there is none or one is unusable."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
    if not files:
        raise UserError(
            f"source: {source}: no such file; give 'python-stdlib', or a path or pattern of {', '.join(SUFFIXES)}"
        )
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"source: {file}: unknown kind of file; expected one of {', '.join(SUFFIXES)}")
        if file.stat().st_size == 0:
            raise UserError(f"source: {file}: the file is empty")
    return files


def stem_of(file: Path) -> str:
    """The file's name without its suffixes: "gsm8k_test" of "gsm8k_test.jsonl.gz"."""
    return file.name.split(".")[0] or file.name


def read_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(line, row) for each row that parses. The line of a Parquet row is its number, from 1."""
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
    elif file.name.endswith(".json"):
        yield from _json_rows(file, set_aside)
    else:
        yield from _jsonl_rows(file, set_aside)


def _jsonl_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    opener: Any = gzip.open if file.name.endswith(".gz") else open
    with opener(file, "rb") as stream:
        try:
            for number, raw in enumerate(stream, start=1):
                if not raw.strip():
                    continue
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                    row = json.loads(line, parse_constant=_no_constant)
                except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
                    set_aside(str(file), number, _why(error), raw[:400].decode("utf-8", "replace").rstrip())
                    continue
                yield number, row
        except (gzip.BadGzipFile, EOFError, OSError) as error:
            raise UserError(f"source: {file}: cannot be read to its end ({error})") from error


def _json_rows(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """The elements of a top-level array; or of the one list in a top-level object, such as {"data": [...]}."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"source: {file}: not UTF-8 text (byte {error.start})") from error
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
            set_aside(str(file), line, _why(error), text[at : at + 400])
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


def _next_object(text: str, broken: int) -> int | None:
    """Where the element after a broken one begins: the next "{" that opens a line, or None."""
    at = broken
    while (end := text.find("\n", at)) >= 0:
        at = _skip(text, end)
        if text[at : at + 1] == "{" and text[:end].rstrip().endswith(","):
            return at
    return None


def _wrapped_list(file: Path, text: str) -> list[Any]:
    try:
        whole = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        hint = "; if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else ""
        raise UserError(f"source: {file}:{line}: not valid JSON ({_why(error)}){hint}") from error
    lists = [value for value in whole.values() if isinstance(value, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        raise UserError(f"source: {file}: expected a list of rows, or an object with exactly one list in it")
    return list(lists[0])


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"source: {file}: not readable as Parquet ({str(error).splitlines()[0]})") from error


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
