"""How many rows a file holds, counted by the rules of its format alone; the readers under test have no part in it.

Lines (JSON Lines, texts of one document a line): a line ends at a line feed; one of white space alone is no row; every
other is one row, whether it says something or not.

Paragraphs: lines as above; every run of lines that are not white space alone is one row.

CSV: text is UTF-8, where bytes that are none stand for themselves; lines end at CR, LF or CR LF. A record is read as
RFC 4180 says: a cell that opens with a quote goes on, over line ends too, to the quote that closes it (two of them are
one in the text), and only a separator or a line end may follow. A line with nothing at all is no record. The first
record names the columns. A record that is against these rules, is not closed at the end of the file or has another
number of cells than there are columns is a wrong row of its first line alone, and the next begins on the line after.

JSON lists, tables: what was written is known, so a row counts as there where its bytes stand in the file unbroken.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from contextlib import suppress

BLANK = b" \t\r\n\x0b\x0c"
BOM = b"\xef\xbb\xbf"


def lines_of(plain: bytes) -> list[bytes]:
    """The rows of JSON Lines and of texts of one document a line, without white space at either end."""
    rows = [line.strip(BLANK) for line in plain.removeprefix(BOM).split(b"\n")]
    return [row for row in rows if row]


def paragraphs_of(plain: bytes) -> list[bytes]:
    """The rows of a text of one document a paragraph, without line ends at either end."""
    rows: list[list[bytes]] = [[]]
    for line in plain.removeprefix(BOM).split(b"\n"):
        if line.strip(BLANK):
            rows[-1].append(line)
        elif rows[-1]:
            rows.append([])
    return [b"\n".join(row).strip(b"\r\n") for row in rows if row]


def records_of(plain: bytes, separator: str) -> tuple[tuple[str, ...], list[tuple[str, ...] | None]]:
    """(columns, records) of CSV; None for each wrong row."""
    text = plain.removeprefix(BOM).decode("utf-8", "surrogateescape")
    records: list[tuple[str, ...] | None] = []
    columns: tuple[str, ...] = ()
    at = 0
    while at < len(text):
        end, cells = _record(text, at, separator)
        if cells == ():
            at = end
        elif cells is None or (columns and len(cells) != len(columns)):
            records.append(None)
            at = _after_line(text, at)
        else:
            if columns:
                records.append(cells)
            columns, at = columns or cells, end
    return columns, records


def _record(text: str, at: int, separator: str) -> tuple[int, tuple[str, ...] | None]:
    """(where the next one begins, cells) of the record that begins here; None: it is none."""
    cells: list[str] = []
    if text[at] in "\r\n":
        return _after_line(text, at), ()
    while True:
        if at < len(text) and text[at] == '"':
            cell, at = "", at + 1
            while True:
                closing = text.find('"', at)
                if closing < 0:
                    return len(text), None
                cell += text[at:closing]
                at = closing + 1
                if text[at : at + 1] != '"':
                    break
                cell, at = cell + '"', at + 1
        else:
            begun = at
            while at < len(text) and text[at] not in "\r\n" and text[at] != separator:
                at += 1
            cell = text[begun:at]
        cells.append(cell)
        if at >= len(text):
            return at, tuple(cells)
        if text[at] in "\r\n":
            return _after_line(text, at), tuple(cells)
        if text[at] != separator:
            return at, None
        at += 1


def _after_line(text: str, at: int) -> int:
    """Where the line that holds this place is over and the next begins."""
    while at < len(text) and text[at] not in "\r\n":
        at += 1
    return at + 2 if text[at : at + 2] == "\r\n" else at + 1


def unpacked(raw: bytes, compression: str) -> tuple[bytes, bool] | None:
    """(what it opens to as far as it opens, whether it is whole) of a compressed file; None where only others can say.

    A file is any number of members one after the other, and zeros may fill it up at the end.
    """
    made = {".gz": lambda: zlib.decompressobj(31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
    if compression not in made:
        return None
    opened = bytearray()
    while raw.strip(b"\0"):
        member = made[compression]()
        at = 0
        with suppress(zlib.error, OSError, lzma.LZMAError, EOFError):
            while at < len(raw) and not member.eof:
                opened += member.decompress(raw[at : at + 64])
                at += 64
        if not member.eof:
            return bytes(opened), False
        raw = member.unused_data + raw[at:]
    return bytes(opened), True
