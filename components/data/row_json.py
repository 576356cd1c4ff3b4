"""The elements of a JSON array, one by one, out of a file of any size: a window of it is in memory, never the whole.

ShareGPT and its like are handed out as one array of half a gigabyte. An element that cannot be parsed costs itself:
reading goes on at the next "{" that opens a line and stands no further in than the broken one: what stands further in
is a part of it. Bytes that are not UTF-8 become lone surrogates, so
that whoever looks at the texts of a row refuses that row alone.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, Final

from components.contract import UserError
from components.data.row_streams import Place, opened

MAX_ROW_BYTES: Final = 16 << 20
"""A larger row is no row; it is set aside without being read into memory as a whole."""
_MAX_OBJECT_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 1 << 20
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_MARGIN: Final = 16
"""An error this near to the end of the window may be gone when more is read: half an escape, half a literal."""
UTF16: Final = (b"\xff\xfe", b"\xfe\xff")

SetAside = Callable[[str, int, str, str], None]
"""Called as (file, line, why, row) for what cannot be read."""


def json_rows(file: Place, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    """(line, row) of a top-level array; (number, row) of the one list in a top-level object, such as {"data": [...]}.

    Raises:
        UserError: the file cannot be read or decompressed to its end, or it is neither of the two.
    """
    with opened(file) as stream:
        window = _Window(file, stream)
        window.skip()
        if window.char() == "[":
            window.move(1)
            yield from _elements(window, set_aside)
        else:
            yield from enumerate(_wrapped_list(window), start=1)


class _Window:
    """What has been read of a file and not parsed yet. line, column: where `at` stands, from 1 and from 0."""

    def __init__(self, file: Place, stream: IO[bytes]) -> None:
        self.file, self.stream = file, stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at, self.line, self.column = "", 0, 1, 0
        self.begun = self.ended = False

    def more(self) -> bool:
        """Read on, at least as much again as is pending; False at the end of the file."""
        if self.ended:
            return False
        self.text, self.at = self.text[self.at :], 0
        raw = self.stream.read(max(_CHUNK_BYTES, len(self.text)))
        if not self.begun and raw.startswith(UTF16):
            raise UserError(f"source: {self.file}: UTF-16 text; save it as UTF-8")
        self.begun, self.ended = True, not raw
        self.text += self.decoder.decode(raw, final=self.ended)
        return not self.ended

    def move(self, to: int) -> None:
        """Go on to this place in the text."""
        self.line += self.text.count("\n", self.at, to)
        last = self.text.rfind("\n", self.at, to)
        self.column = to - last - 1 if last >= 0 else self.column + to - self.at
        self.at = to

    def skip(self) -> None:
        """Go on to the next character that is no white space, or to the end."""
        while True:
            blank = _BLANK.match(self.text, self.at)
            assert blank is not None, "it matches nothing at all too"
            self.move(blank.end())
            if self.at < len(self.text) or not self.more():
                return

    def rest(self, most: int) -> str | None:
        """All that is left, piece by piece; None where it is more than this many characters."""
        pieces, size = [self.text[self.at :]], self.pending()
        self.text, self.at = "", 0
        while size <= most and self.more():
            pieces.append(self.text)
            size += len(self.text)
            self.text = ""
        return "".join(pieces) if self.ended else None

    def char(self) -> str:
        """The character here, "" at the end."""
        return self.text[self.at : self.at + 1]

    def pending(self) -> int:
        """Characters that have been read and not parsed."""
        return len(self.text) - self.at


def _elements(window: _Window, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
    decoder = json.JSONDecoder(parse_constant=no_constant)
    file = str(window.file)
    window.skip()
    while window.char() != "]":
        try:
            row, end = _element(window, decoder)
        except (ValueError, RecursionError) as error:
            line, shown = window.line, window.text[window.at : window.at + 400]
            resumed = _next_object(window, window.column)
            set_aside(file, line, why(error) + ("" if resumed else "; what follows it cannot be read either"), shown)
            if not resumed:
                return
            continue
        yield window.line, row
        window.move(end)
        window.skip()
        if window.char() == ",":
            window.move(window.at + 1)
            window.skip()
        elif window.char() not in ("]", "{"):  # before an object a comma is missing, and nothing with it
            set_aside(file, window.line, "the list breaks off here", window.text[window.at : window.at + 80])
            if not _next_object(window, window.column):
                return
    window.move(window.at + 1)
    window.skip()
    if window.char():
        shown = window.text[window.at : window.at + 80]
        set_aside(file, window.line, "text after the end of the list", shown)


def _element(window: _Window, decoder: json.JSONDecoder) -> tuple[Any, int]:
    """(element, where it ends) of what stands here; raises ValueError or RecursionError where there is none."""
    while True:
        try:
            row, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            cut = error.msg.startswith("Unterminated") or error.pos >= len(window.text) - _MARGIN
            if not cut or window.ended:
                raise
            if window.pending() > MAX_ROW_BYTES:
                raise ValueError(f"longer than {MAX_ROW_BYTES >> 20} MiB") from error
        else:
            if end < len(window.text) or window.ended:  # a number at the end of the window may go on
                return row, end
        window.more()


def _next_object(window: _Window, column: int) -> bool:
    """Go on to the element after a broken one, which begins at `column`; False: there is none.

    That is the next "{" that opens a line, no further in and not as the first of a list or a field's value: in a
    pretty-printed file the objects inside the broken element open lines too. A comma may be what is broken.
    """
    before = ""  # the last character that is no white space
    while True:
        end = window.text.find("\n", window.at)
        passed = window.text[window.at : end if end >= 0 else len(window.text)].rstrip()
        before = passed[-1:] or before
        if end < 0:
            window.move(len(window.text))
            if not window.more():
                return False
            continue
        window.move(end)
        window.skip()
        if window.char() == "{" and before not in ("[", ":") and window.column <= column:
            return True
        if not window.char():
            return False


def _wrapped_list(window: _Window) -> list[Any]:
    file = window.file
    text = window.rest(_MAX_OBJECT_BYTES)
    if text is None:
        raise UserError(f"source: {file}: one object of more than {_MAX_OBJECT_BYTES >> 20} MiB; save it as .jsonl")
    try:
        whole = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        line = window.line - 1 + getattr(error, "lineno", 1)
        hint = "if it holds one object a line, name it .jsonl" if "Extra data" in str(error) else "mend the file"
        raise UserError(f"source: {file}:{line}: not valid JSON ({why(error)}); {hint}") from error
    lists = [value for value in whole.values() if isinstance(value, list)] if isinstance(whole, dict) else []
    if len(lists) != 1:
        raise UserError(f"source: {file}: expected a list of rows, or an object with exactly one list in it")
    return list(lists[0])


def no_constant(name: str) -> None:
    """For `parse_constant`: NaN and Infinity are not JSON."""
    raise ValueError(f"{name} is not JSON")


def why(error: Exception) -> str:
    """Why a row is no row, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} (column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start} of the line)"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error)
