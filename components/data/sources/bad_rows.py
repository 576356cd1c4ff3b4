"""Rows and files that cannot be used: each fault is one line for people and a code under which it is counted.

A reader gives a bad row to its caller (`SetAside`) and reads on; a file that cannot be read further ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from components.contract import UserError

Row = Mapping[str, Any]
"""A row of a stranger's file, as parsed."""
MAX_ROW_BYTES: Final = 16 << 20
"""Larger rows are set aside without being read into memory as a whole."""
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")


class BadRow(ValueError):
    """A row that cannot be used. str() is one line; `code` is the same for all rows with this fault."""

    def __init__(self, message: str, code: str = "wrong_type") -> None:
        super().__init__(message)
        self.code = code


class BadFile(UserError):
    """A file whose content cannot be read as rows; `code` is the same for all files with this fault."""

    def __init__(self, message: str, code: str = "unreadable_file") -> None:
        super().__init__(message)
        self.code = code


SetAside = Callable[[str, int, BadRow, str], None]
"""Called as (file, line, fault, the row's beginning) for each row that cannot be read."""


def row_too_long() -> BadRow:
    """The fault of a row of more than MAX_ROW_BYTES."""
    return BadRow(f"longer than {MAX_ROW_BYTES >> 20} MiB", "too_long_a_row")


def refuse_utf16(location: object, beginning: bytes) -> None:
    """Raise BadFile where a file begins with the byte-order mark of UTF-16."""
    if beginning.startswith(_UTF16):
        raise BadFile(f"source: {location}: UTF-16 text; save it as UTF-8", "not_utf8")


def refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which are not JSON; for `parse_constant`."""
    raise BadRow(f"{name} is not JSON", "not_json")


def parse_fault(error: Exception) -> BadRow:
    """The fault of a row that a parser of JSON or a decoder of text has refused."""
    if isinstance(error, BadRow):
        return error
    if isinstance(error, json.JSONDecodeError):
        return BadRow(f"not valid JSON: {error.msg} (column {error.colno})", "not_json")
    if isinstance(error, UnicodeDecodeError):
        return BadRow(f"not UTF-8 text (byte {error.start} of the line)", "not_utf8")
    if isinstance(error, RecursionError):
        return BadRow("nested too deeply", "nested_too_deeply")
    return BadRow(str(error), "unreadable")


def row_excerpt(row: Any) -> str:
    """The beginning of a parsed row as JSON, for the list of rows that were set aside."""
    return json.dumps(row, ensure_ascii=True, default=str)[:400]
