"""The texts in a GGUF file: its metadata without the vocabulary.

A vocabulary is megabytes of meaningless words; the entries after it, such as the chat template, matter.
Form: magic, version u32, tensors u64, entries u64. An entry is a name (u64 length, UTF-8), a type u32 and a value. A
string is stored like a name; an array is a type u32, a count u64 and the values.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from components.contract import UserError

STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type -> bytes of a value of fixed size."""
SHORT_LIST = 64
"""Longer lists of strings are vocabularies and merges, which are skipped."""


def gguf_texts(file: Path) -> list[str]:
    """Names and strings of a file's metadata, without lists of more than SHORT_LIST. Raises UserError, one line."""
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).texts()
    except (IndexError, KeyError, ValueError) as error:
        raise UserError(
            f"{file.parent.name}/{file.name}: no sound GGUF file ({error!r:.60}); convert it again"
        ) from error


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def texts(self) -> list[str]:
        if self._take(4) != b"GGUF":
            raise ValueError("other first bytes")
        self._number(4)
        self._number(8)
        texts: list[str] = []
        for _ in range(self._number(8)):
            texts.append(self._string())
            texts += self._value(self._number(4))
        return texts

    def _value(self, kind: int) -> list[str]:
        if kind == STRING:
            return [self._string()]
        if kind != ARRAY:
            self._take(SIZES[kind])
            return []
        inner, count = self._number(4), self._number(8)
        if inner != STRING:
            self._skip(SIZES[inner] * count)
            return []
        if count <= SHORT_LIST:
            return [self._string() for _ in range(count)]
        for _ in range(count):
            self._skip(self._number(8))
        return []

    def _string(self) -> str:
        return self._take(self._number(8)).decode("utf-8", errors="replace")

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, size: int) -> bytes:
        start = self.at
        self._skip(size)
        return self.data[start : self.at]

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("cut short")
