"""Measures how much of a text repeats itself (loops of a model, pages copied twice), alike in Chinese and English.

It counts long lines that occurred before, and windows of 16 characters that occurred before, which need no notion of a
word. Only letters and digits count: the frames of tables and drawings repeat anyway. Windows are counted only where
`zlib` finds the text far more compressible than prose, since that check costs a hundredth.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

WINDOW: Final = 16
"""Characters: long enough that common phrases do not match, short enough to detect a loop of one word."""
MIN_CHARACTERS: Final = 160
"""Shorter texts are not checked: a refrain or a list of three similar items is not a loop."""
_MIN_LINE: Final = 12
"""Shorter lines (closing brackets, `return None`) repeat in any code."""
_RUN: Final = re.compile(r"([^\W\d_])\1{39,}")
"""One letter or ideograph at least forty times in a row."""
_NO_WORD: Final = re.compile(r"[\W_]+")
_MAX_CHARACTERS: Final = 50_000


def repeated_share(text: str, threshold: float = 0.0) -> float:
    """The larger of two shares: characters in lines that occurred before, windows that occurred before. From 0 to 1.

    threshold: the share above which the caller acts; 0 is returned for a text that compresses too little to reach it.
    """
    # in every run of forty, four letters six or seven apart are equal, and hardly anywhere else
    apart = zip(text[::20], text[6::20], text[13::20], text[19::20], strict=False)
    if any(a == b == c == d for a, b, c, d in apart) and _RUN.search(text):
        return 1.0
    if len(text) < MIN_CHARACTERS:
        return 0.0
    text = text[:_MAX_CHARACTERS]
    raw = text.encode("utf-8", errors="surrogatepass")
    # a text with the repeated share r compresses to about (1 - r) times the ratio of prose, which is at most 0.75
    if threshold and len(zlib.compress(raw, 1)) > 0.75 * (1 - threshold) * len(raw) + 64:
        return 0.0
    return max(_repeated_lines_share(text), _repeated_windows_share(text))


def _repeated_lines_share(text: str) -> float:
    seen_lines: set[str] = set()
    repeated = total = 0
    for line in text.split("\n"):
        stripped = _NO_WORD.sub(" ", line).strip()
        total += len(stripped)
        if len(stripped) < _MIN_LINE:
            continue
        if stripped in seen_lines:
            repeated += len(stripped)
        seen_lines.add(stripped)
    return repeated / total if total else 0.0


def _repeated_windows_share(text: str) -> float:
    squeezed = _NO_WORD.sub(" ", text)
    count = len(squeezed) - WINDOW + 1
    if len(squeezed) < MIN_CHARACTERS:
        return 0.0
    return 1.0 - len({squeezed[start : start + WINDOW] for start in range(count)}) / count
