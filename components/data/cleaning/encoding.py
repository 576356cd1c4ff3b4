"""Detects text that was decoded with the wrong encoding, and repairs it where the repair is certain.

`ftfy` handles single-byte mojibake ("Ã©" for "é", UTF-8 Chinese read as Latin-1). It does not look for two further
kinds in Chinese: UTF-8 read as GBK, ideographs that decode as UTF-8 when encoded back ("浣犲ソ" was "你好"); and GBK
read as Latin-1, long runs of accented letters that decode as GBK ("ÄãºÃ").
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import ftfy
from ftfy import TextFixerConfig
from ftfy.badness import is_bad

_CONTROL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\ufffe\uffff\ud800-\udfff]")
_RUN: Final = re.compile("[^\x00-\x7f]{6,}")
_CLAUSE: Final = re.compile("[^\x00-\x7f，。！？；：、]{6,}")
"""A run between Chinese punctuation: a text joined from two may have a correct clause beside a wrong one."""
_LATIN_RUN: Final = re.compile("[\u00a1-\u00ff]{6,}")
_LEADING: Final = re.compile("[\x80-\x9f\u00c2-\u00d6\u00d8-\u00f5\u0100-\u017f\u0370-\u04ff√≈‚\u2500-\u257f]")
"""First bytes of UTF-8 characters as read in the encodings that `ftfy` knows; Chinese has none of these."""
_LOST: Final = ("锟斤拷", "烫烫烫", "屯屯屯")
"""Two U+FFFD read as GBK, and fill patterns of debuggers: the original text is lost."""
_MIN_BYTES: Final = 12
_DECODES: Final = 0.85
"""Share of bytes that must decode; a run may have lost some at its ends."""


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
    if not (_LEADING.search(text) and is_bad(text)):
        return False
    repaired: str = ftfy.fix_encoding(text)
    return repaired != text  # `is_bad` alone also matches formulae and emoticons


def repair(text: str) -> str:
    """The text with certain faults repaired; the same text where nothing is wrong. Never raises.

    Encodings are repaired; control characters, terminal escape sequences and byte-order marks are removed. Quotes,
    widths, ligatures and entities are unchanged: those are the writer's choice.
    """
    if text.isascii() and not has_control_characters(text):
        return text
    repaired = ftfy.fix_text(text if text.isascii() else _repaired_chinese(text), _config())
    return _CONTROL.sub("", repaired).removeprefix("\ufeff")


@functools.cache
def _config() -> Any:
    return TextFixerConfig(
        unescape_html=False,
        uncurl_quotes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        fix_line_breaks=False,
        normalization=None,
    )


def _utf8_as_gbk(run: str) -> bool:
    """Whether a run of non-ASCII characters is UTF-8 that was read as GBK.

    If so, nearly all of its GBK bytes are valid UTF-8 for ideographs; of real Chinese only a few pairs of bytes happen
    to be valid UTF-8, and they stand for accented letters.
    """
    raw = run.encode("gb18030", errors="ignore")
    if len(raw) < _MIN_BYTES:
        return False
    meant = raw.decode("utf-8", errors="ignore")
    if len(meant.encode("utf-8")) < _DECODES * len(raw):
        return False
    return 2 * sum(character >= "\u2e80" for character in meant) >= len(meant)


def _gbk_as_latin(text: str) -> str | None:
    """The first run of non-ASCII letters that decodes to Chinese as GBK; no European language has such runs."""
    for match in _LATIN_RUN.finditer(text):
        run = match.group()
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


def _repaired_chinese(text: str) -> str:
    """Repair every run by itself, and then every clause of runs that are wrong in part."""
    for piece in (_RUN, _CLAUSE):
        text = piece.sub(
            lambda run: _reencoded(run.group(), "gb18030", "utf-8") if _utf8_as_gbk(run.group()) else run.group(), text
        )
    if _gbk_as_latin(text) is not None:
        text = _LATIN_RUN.sub(lambda run: _reencoded(run.group(), "latin-1", "gbk"), text)
    return text


def _reencoded(run: str, wrong: str, right: str) -> str:
    try:
        return run.encode(wrong).decode(right)
    except UnicodeError:  # cut in the middle of a character: uncertain, so left unchanged (and dropped later)
        return run
