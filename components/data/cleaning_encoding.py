"""Text that was decoded with the wrong encoding: found, and mended where that is certain.

Single-byte mojibake ("Ã©" for "é", UTF-8 Chinese read as Latin-1) is `ftfy`'s work. Chinese has two more kinds that
`ftfy` does not look for: UTF-8 read as GBK, ideographs that decode as UTF-8 when encoded back ("浣犲ソ" was "你好");
and GBK read as Latin-1, long runs of accented letters that decode as GBK ("ÄãºÃ").
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff\ud800-\udfff]")
_RUN: Final = re.compile("[^\x00-\x7f]{6,}")
_CLAUSE: Final = re.compile("[^\x00-\x7f，。！？；：、]{6,}")
"""Between real punctuation: a text put together from two may have a right clause beside a wrong one."""
_LATIN_RUN: Final = re.compile("[\u00a1-\u00ff]{6,}")
_LEADING: Final = re.compile("[\x80-\x9f\u00c2-\u00d6\u00d8-\u00f5\u0100-\u017f\u0370-\u04ff√≈‚\u2500-\u257f]")
"""What the first byte of a UTF-8 character looks like in the encodings that `ftfy` knows: Chinese has none of these."""
_LOST: Final = ("锟斤拷", "烫烫烫", "屯屯屯")
"""U+FFFD twice read as GBK, and what a debugger fills memory with: nothing can bring that text back."""
_MIN_BYTES: Final = 12
_DECODES: Final = 0.85
"""Share of bytes that must decode: at its ends a run has lost some."""


def has_control_characters(text: str) -> bool:
    """Whether there are control characters besides tab, line breaks and form feed, or halves of surrogate pairs."""
    return _CONTROL.search(text) is not None


def is_mojibake(text: str) -> bool:
    """Whether the text reads like one decoded with the wrong encoding, wholly or in part."""
    if text.isascii():
        return False
    if any(mark in text for mark in _LOST) or _gbk_as_latin(text) is not None:
        return True
    if any(_utf8_as_gbk(run) for run in _CLAUSE.findall(text)):
        return True
    if not _LEADING.search(text):
        return False
    from ftfy.badness import is_bad

    if not is_bad(text):
        return False
    import ftfy

    mended: str = ftfy.fix_encoding(text)
    return mended != text  # `is_bad` alone also speaks up at formulae and emoticons


def repair(text: str) -> str:
    """The text as it was meant, as far as that is certain; itself where nothing is wrong. Never raises.

    Encodings mended, control characters, escape sequences of terminals and byte-order marks removed. Quotes, widths,
    ligatures and entities stay as they are: those are the writer's.
    """
    if text.isascii() and not has_control_characters(text):
        return text
    mended = _han_mended(text) if not text.isascii() else text
    import ftfy

    mended = ftfy.fix_text(mended, _config())
    return _CONTROL.sub("", mended).removeprefix("\ufeff")


@functools.cache
def _config() -> Any:
    from ftfy import TextFixerConfig

    return TextFixerConfig(
        unescape_html=False,
        uncurl_quotes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        fix_line_breaks=False,
        normalization=None,
    )


def _utf8_as_gbk(run: str) -> bool:
    """Whether a run of characters beyond ASCII is UTF-8 that was read as GBK.

    Encoded back, nearly all of its bytes are valid UTF-8, and mean ideographs: of real Chinese a few pairs of bytes
    happen to be valid, and mean accented letters.
    """
    raw = run.encode("gb18030", errors="ignore")
    if len(raw) < _MIN_BYTES:
        return False
    meant = raw.decode("utf-8", errors="ignore")
    if len(meant.encode("utf-8")) < _DECODES * len(raw):
        return False
    return 2 * sum(character >= "\u2e80" for character in meant) >= len(meant)


def _gbk_as_latin(text: str) -> str | None:
    """The first run of letters beyond ASCII that is Chinese when read as GBK; no European language has such runs."""
    for found in _LATIN_RUN.finditer(text):
        run = found.group()
        if len(set(run)) < 4:
            continue
        try:
            meant = run[: len(run) // 2 * 2].encode("latin-1").decode("gbk")
        except UnicodeDecodeError:
            continue
        common = sum(
            "\u4e00" <= character <= "\u9fa5" or character in "，。！？：；、“”（）《》" for character in meant
        )
        if common > 0.8 * len(meant):
            return run
    return None


def _han_mended(text: str) -> str:
    """Every run by itself, and every clause of those that are wrong in part."""
    for piece in (_RUN, _CLAUSE):
        text = piece.sub(
            lambda run: _other_way(run.group(), "gb18030", "utf-8") if _utf8_as_gbk(run.group()) else run.group(), text
        )
    if _gbk_as_latin(text) is not None:
        text = _LATIN_RUN.sub(lambda run: _other_way(run.group(), "latin-1", "gbk"), text)
    return text


def _other_way(run: str, wrong: str, right: str) -> str:
    try:
        return run.encode(wrong).decode(right)
    except UnicodeError:  # cut in the middle of a character: not certain, so left alone (and dropped)
        return run
