"""Texts as sequences of units, so that texts in all languages are compared in the same way.

A unit is a word, one character of a script without spaces (Chinese, Japanese, Thai, ...), or one symbol such as "+".
Case, width, punctuation and white space do not count. Units and runs of n units (n-grams) are 64-bit hashes. They are
computed for a whole batch of texts by a few passes over one array of code points, because a Python loop over words
would dominate the cost.

A run x_0 ... x_m-1 has the hash sum x_i B^i mod 2^64 (Karp and Rabin 1987, with B odd and the division by the power of
the first position done by B's inverse), mixed by the finaliser of splitmix64. Two prefix sums give the hash of any run.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Small = NDArray[np.uint32]
Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]
Marks = NDArray[np.bool_]

_CODE_POINTS: Final = 0x110000
_BASE_OF_CHARACTERS: Final = 0x9E3779B97F4A7C15
_BASE_OF_UNITS: Final = 0xD1342543DE82EF95
_SEPARATOR, _WORD, _ALONE = 0, 1, 2
_WITHOUT_SPACES: Final = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x2E80, 0x2FDF),  # Han radicals
    (0x3005, 0x3007),  # Han iteration marks and zero
    (0x3041, 0x30FF),  # kana
    (0x3105, 0x312F),  # bopomofo
    (0x31F0, 0x31FF),  # kana
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
"""Ranges of code points in which each letter is a unit."""


@dataclass(frozen=True)
class Units:
    """The units of several texts, one text after the other.

    hashes: one per unit. offsets: text t has units offsets[t] to offsets[t + 1] (num_texts + 1).
    begins, ends: the range of each unit in the normalised texts joined by one character, in characters.
    prefix: prefix sums from which the hashes of runs are computed (num_units + 1).
    """

    hashes: Hashes
    offsets: Places
    begins: Places
    ends: Places
    prefix: Hashes

    def runs(self, firsts: Places, lasts: Places) -> Hashes:
        """The hash of each run of the units firsts[i] up to, but without, lasts[i]."""
        inverse = _inverse_powers(_BASE_OF_UNITS, len(self.prefix))
        return mix_bits((self.prefix[lasts] - self.prefix[firsts]) * inverse[firsts])

    def joined(self, num_texts: Sequence[int]) -> Units:
        """The same units with every num_texts[i] consecutive texts joined into one: turns become chats."""
        ends = np.concatenate([[0], np.cumsum(np.asarray(num_texts, np.int64))])
        return Units(self.hashes, self.offsets[ends], self.begins, self.ends, self.prefix)


def normalised(text: str) -> str:
    """The text without differences of case and width: NFKC, then case-folded."""
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def units_of(texts: Sequence[str]) -> Units:
    """The units of normalised texts. Lone surrogates are separators."""
    codes = np.frombuffer("\n".join(texts).encode("utf-32-le", "surrogatepass"), "<u4")
    kinds = _kinds()[codes]
    word, alone = kinds == _WORD, kinds == _ALONE
    begins, ends = word.copy(), word.copy()
    begins[1:] &= ~word[:-1]
    ends[:-1] &= ~word[1:]
    first, last = np.flatnonzero(begins | alone), np.flatnonzero(ends | alone) + 1
    prefix = _prefix(_letters()[codes], _BASE_OF_CHARACTERS)
    hashes = mix_bits((prefix[last] - prefix[first]) * _inverse_powers(_BASE_OF_CHARACTERS, len(codes) + 1)[first])
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    text_begins = np.concatenate([[0], np.cumsum(lengths + 1)])
    offsets = np.searchsorted(first, text_begins).astype(np.int64)
    return Units(hashes, offsets, first, last, _prefix(hashes, _BASE_OF_UNITS))


def ngrams(units: Units, n: int) -> tuple[Hashes, Places, Places]:
    """(hashes, first unit of each run, offsets by text) of all runs of n units within a text."""
    lengths = np.diff(units.offsets)
    counts = np.maximum(lengths - n + 1, 0)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    # number k of text t begins at unit k - offsets[t] + units.offsets[t]
    firsts = np.arange(offsets[-1]) + np.repeat(units.offsets[:-1] - offsets[:-1], counts)
    return units.runs(firsts, firsts + n), firsts, offsets


def mix_bits(values: Hashes) -> Hashes:
    """The finaliser of splitmix64 for each value: a bijection in which every bit depends on every other."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _prefix(values: Hashes, base: int) -> Hashes:
    """Prefix sums of values[i] base^i mod 2^64, from 0 (len(values) + 1)."""
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _powers(base, len(values)), out=sums[1:])
    return sums


def _powers(base: int, count: int) -> Hashes:
    """base^0 to base^(count - 1), from a cached table of a power of two of them."""
    return _table(base, max(1 << 18, 1 << (max(count, 1) - 1).bit_length()))[:count]


def _inverse_powers(base: int, count: int) -> Hashes:
    return _powers(pow(base, -1, 1 << 64), count)


@functools.lru_cache(maxsize=8)
def _table(base: int, count: int) -> Hashes:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


@functools.lru_cache(maxsize=1)
def _kinds() -> NDArray[np.uint8]:
    """For each code point whether it separates units, belongs to a word, or is a unit alone."""
    kind_of_category = {"L": _WORD, "M": _WORD, "N": _WORD, "S": _ALONE}
    category = unicodedata.category
    kinds = np.fromiter(
        (kind_of_category.get(category(chr(code))[0], _SEPARATOR) for code in range(_CODE_POINTS)),
        np.uint8,
        _CODE_POINTS,
    )
    for low, high in _WITHOUT_SPACES:
        kinds_in_range = kinds[low : high + 1]
        kinds_in_range[kinds_in_range == _WORD] = _ALONE
    return kinds


@functools.lru_cache(maxsize=1)
def _letters() -> Hashes:
    """A 64-bit hash of each code point."""
    return mix_bits(np.arange(1, _CODE_POINTS + 1, dtype=np.uint64) * np.uint64(_BASE_OF_CHARACTERS))
