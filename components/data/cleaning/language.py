"""Detection of a text's language and domain (code, mathematics): offline, deterministic, from the text alone.

The script decides where it can: kana is Japanese, Hangul Korean, ideographs without kana Chinese. Where several
languages share a script, `py3langid` (naive Bayes, 4.6 MB in its wheel, no network) chooses among those in use today.
Fenced code and URLs are ignored. The result is "" where a text is too short, since a wrong stratum is worse than none.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from py3langid.langid import MODEL_FILE, LanguageIdentifier

from components.data.sources.turns import Message

_SAMPLE: Final = 320
"""Number of characters that are classified: more cost time and do not change the result."""
_MIN_LETTERS: Final = 3
_MIN_CONFIDENCE: Final = 0.4
_HAN_WEIGHT: Final = 5
_NOT_PROSE: Final = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|(?:https?://|www\.)\S+|<[^<>\n]{1,200}>", re.DOTALL)

_ONE_LANGUAGE: Final = {
    "HAN": "zh",
    "KANA": "ja",
    "HANGUL": "ko",
    "GREEK": "el",
    "THAI": "th",
    "GEORGIAN": "ka",
    "ARMENIAN": "hy",
    "TAMIL": "ta",
    "TELUGU": "te",
    "KANNADA": "kn",
    "MALAYALAM": "ml",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "SINHALA": "si",
    "KHMER": "km",
    "LAO": "lo",
    "MYANMAR": "my",
    "HEBREW": "he",
}
_LANGUAGES_OF_SCRIPT: Final = {
    "LATIN": "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms nl no pl pt ro sk sl sq sv sw tl tr vi",
    "CYRILLIC": "ru uk be bg sr mk kk ky mn",
    "ARABIC": "ar fa ur ps ug",
    "DEVANAGARI": "hi mr ne",
    "BENGALI": "bn as",
}
_SINGLE_CANDIDATE: Final = {"CYRILLIC": "ru", "ARABIC": "ar", "DEVANAGARI": "hi", "BENGALI": "bn"}
"""Script -> its most common language, used where the model is not confident."""

_lock = threading.Lock()


def language_of(text: str) -> str:
    """ISO 639-1 code of the text's main language, "" where the text is too short.

    Simplified and traditional Chinese are both "zh"; code without comments has no language.
    """
    prose = _NOT_PROSE.sub(" ", text[: 4 * _SAMPLE])[:_SAMPLE]
    if prose.isascii():
        letters = sum(map(str.isalpha, prose))
        return _classify("LATIN", prose) if letters >= _MIN_LETTERS else ""
    scripts: Counter[str] = Counter()
    for character, count in Counter(prose).items():
        if script := _script_of(character):
            scripts[script] += count
    if not scripts:
        return ""
    cjk = scripts["HAN"] + scripts["KANA"]
    if cjk:  # an ideograph counts like a word: Chinese with English terms is Chinese
        kana, scripts["HAN"], scripts["KANA"] = scripts["KANA"], _HAN_WEIGHT * cjk, 0
        if 10 * kana >= cjk:
            scripts["KANA"], scripts["HAN"] = scripts["HAN"], 0
    for script, count in sorted(scripts.items(), key=lambda entry: (-entry[1], entry[0])):
        language = _ONE_LANGUAGE.get(script) or (_classify(script, prose) if count >= _MIN_LETTERS else "")
        if language:
            return language
    return ""


def language_of_messages(messages: Sequence[Message]) -> str:
    """The language of the assistant's turns (which drafters learn), or else of the user's; "" where unknown."""
    for role in ("assistant", "user"):
        texts = "\n".join(str(message.get("content") or "") for message in messages if message.get("role") == role)
        if language := language_of(texts):
            return language
    return ""


def domain_of(text: str) -> str:
    """The domain of a text: "code", "mathematics" or "general"; "" for an empty text.

    Code has a fence, or a third of its lines look like statements. Mathematics has formulae or steps of a calculation.
    """
    if not text.strip():
        return ""
    head = text[:8000]
    if "```" in head and _FENCE.search(head):
        return "code"
    lines = [line for line in head.split("\n") if line.strip()]
    like_code = sum(_STATEMENT.match(line) is not None for line in lines)
    if len(lines) >= 3 and like_code * 3 >= len(lines):
        return "code"
    formulae = len(_FORMULA.findall(head))
    return "mathematics" if formulae >= 3 or formulae * 120 >= max(len(head), 240) else "general"


_FENCE: Final = re.compile(r"```[^\n]*\n[^`]*\S[^`]*")
_STATEMENT: Final = re.compile(
    r"\s*(?:def |class |import |from \S+ import |return\b|if .*[:{]$|for .*[:{]$|while .*[:{]$|else\b.*[:{]$|#include"
    r"|(?:public|private|static|const|let|var|func|fn|function|package|using|namespace) |[{}\])]+;?\s*$|.*[;{]\s*$"
    r"|@\w+|<\?php|SELECT .* FROM |[\w.]+ ?[+*/-]?= ?\S|[\w.]+\(.*\)\s*$)"
)
_FORMULA: Final = re.compile(
    r"\\(?:frac|sqrt|sum|int|begin|boxed|times|cdot|le|ge|pi|alpha|left|mathbb)\b|\$[^$\n]{1,80}[=^_\\+<>][^$\n]{0,80}\$"
    r"|\d\s*[-+*/×÷^]\s*\d[^=\n]{0,40}=\s*-?\d|\b[a-z]\s*(?:\^|²|³)\s*\d?|<<[^<>\n]+=[^<>\n]+>>"
)


@functools.lru_cache(maxsize=65_536)
def _script_of(character: str) -> str:
    """The script of a letter, by the first word of its Unicode name; HAN or KANA in East Asia; "" for others."""
    if not character.isalpha():
        return ""
    first = unicodedata.name(character, "").split(" ", 1)[0].split("-", 1)[0]
    if first in ("CJK", "IDEOGRAPHIC"):
        return "HAN"
    if first in ("HIRAGANA", "KATAKANA", "HALFWIDTH"):
        return "KANA"
    return first if first in _ONE_LANGUAGE or first in _LANGUAGES_OF_SCRIPT else ""


def _classify(script: str, prose: str) -> str:
    """The most probable language among those of one script."""
    with _lock:
        model = _model(script)
    language, probability = model.classify(" ".join(prose.split()))
    return str(language) if probability >= _MIN_CONFIDENCE else _SINGLE_CANDIDATE.get(script, "")


@functools.cache
def _model(script: str) -> Any:
    """py3langid restricted to the languages of a script."""
    model = copy.copy(_all_languages())
    model.set_languages(_LANGUAGES_OF_SCRIPT[script].split())
    return model


@functools.cache
def _all_languages() -> Any:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
