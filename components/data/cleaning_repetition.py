"""How much of a text stood in it before: loops of a model, pages copied twice; the same for Chinese and English.

By lines (long ones that occurred before) and by windows of 16 characters, which need no notion of a word. Only letters
and digits count: the frames of tables and drawings repeat and mean nothing. Windows are counted only where `zlib` finds
the text far more compressible than prose, since that costs a hundredth.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

WINDOW: Final = 16
"""Characters: long enough that common phrases do not count, short enough to see a loop of one word."""
MIN_CHARACTERS: Final = 160
"""Shorter texts are left alone: a refrain or a list of three alike is no loop."""
_MIN_LINE: Final = 12
"""Shorter lines (closing brackets, `return None`) repeat in any code."""
_RUN: Final = re.compile(r"([^\W\d_])\1{39,}")
"""One letter or ideograph forty times on end."""
_NO_WORD: Final = re.compile(r"[\W_]+")
_MAX_LOOKED_AT: Final = 50_000


def repeated_share(text: str, threshold: float = 0.0) -> float:
    """The larger of two shares: characters in lines that occurred before, windows that occurred before. From 0 to 1.

    threshold: what the caller compares with; a text that compresses too little to reach it is answered with 0.
    """
    # four letters six or seven apart are equal in every run of forty, and hardly anywhere else
    apart = zip(text[::20], text[6::20], text[13::20], text[19::20], strict=False)
    if any(a == b == c == d for a, b, c, d in apart) and _RUN.search(text):
        return 1.0
    if len(text) < MIN_CHARACTERS:
        return 0.0
    text = text[:_MAX_LOOKED_AT]
    raw = text.encode("utf-8", errors="surrogatepass")
    # a text of which the share r is repeated compresses to about (1 - r) of what its new part does, at most 0.75
    if threshold and len(zlib.compress(raw, 1)) > 0.75 * (1 - threshold) * len(raw) + 64:
        return 0.0
    return max(_of_lines(text), _of_windows(text))


def _of_lines(text: str) -> float:
    seen: set[str] = set()
    repeated = total = 0
    for line in text.split("\n"):
        stripped = _NO_WORD.sub(" ", line).strip()
        total += len(stripped)
        if len(stripped) < _MIN_LINE:
            continue
        if stripped in seen:
            repeated += len(stripped)
        seen.add(stripped)
    return repeated / total if total else 0.0


def _of_windows(text: str) -> float:
    squeezed = _NO_WORD.sub(" ", text)
    count = len(squeezed) - WINDOW + 1
    if len(squeezed) < MIN_CHARACTERS:
        return 0.0
    return 1.0 - len({squeezed[start : start + WINDOW] for start in range(count)}) / count
