"""In which language a text is, and whether it is code or mathematics: offline, deterministic, from the text alone.

Scripts decide where they can (kana is Japanese, Hangul Korean, ideographs without kana Chinese); where several
languages share a script, `py3langid` (naive Bayes, 4.6 MB in its wheel, no network) chooses among those that people
write in today. Code in fences, and addresses, say nothing about a language and are left out. "" where a text is too
short to say: no guess is better than a wrong stratum.
"""

from __future__ import annotations

import copy
import functools
import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

_SAMPLE: Final = 320
"""Characters that are looked at: more does not change the answer, only its price."""
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
_WRITTEN: Final = {
    "LATIN": "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms nl no pl pt ro sk sl sq sv sw tl tr vi",
    "CYRILLIC": "ru uk be bg sr mk kk ky mn",
    "ARABIC": "ar fa ur ps ug",
    "DEVANAGARI": "hi mr ne",
    "BENGALI": "bn as",
}
_SINGLE_CANDIDATE: Final = {"CYRILLIC": "ru", "ARABIC": "ar", "DEVANAGARI": "hi", "BENGALI": "bn"}
"""Where the model cannot tell: the script alone says that it is not Latin, and this is its most written language."""

_lock = threading.Lock()


def language_of(text: str) -> str:
    """ISO 639-1 code of the text's main language, "" where there is too little of it to say.

    Simplified and traditional Chinese are both "zh"; code without comments has no language.
    """
    prose = _NOT_PROSE.sub(" ", text[: 4 * _SAMPLE])[:_SAMPLE]
    if prose.isascii():
        letters = sum(map(str.isalpha, prose))
        return _of_script("LATIN", prose) if letters >= _MIN_LETTERS else ""
    scripts: Counter[str] = Counter()
    for character, count in Counter(prose).items():
        if script := _script_of(character):
            scripts[script] += count
    if not scripts:
        return ""
    cjk = scripts["HAN"] + scripts["KANA"]
    if cjk:  # an ideograph says as much as a word: Chinese with English terms in it is Chinese
        kana, scripts["HAN"], scripts["KANA"] = scripts["KANA"], _HAN_WEIGHT * cjk, 0
        if 10 * kana >= cjk:
            scripts["KANA"], scripts["HAN"] = scripts["HAN"], 0
    for script, count in sorted(scripts.items(), key=lambda entry: (-entry[1], entry[0])):
        found = _ONE_LANGUAGE.get(script) or (_of_script(script, prose) if count >= _MIN_LETTERS else "")
        if found:
            return found
    return ""


def language_of_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """The language of the answers (what a drafter learns to guess), of the questions where answers do not tell."""
    for role in ("assistant", "user"):
        said = "\n".join(str(message.get("content") or "") for message in messages if message.get("role") == role)
        if found := language_of(said):
            return found
    return ""


def domain_of(text: str) -> str:
    """What a conversation is about, as far as its text shows: "code", "mathematics" or "general"; "" for no text.

    Code: a fence, or a third of the lines look like statements. Mathematics: formulae, or steps of a calculation.
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
    """The script of a letter as the Unicode names begin, HAN and KANA for those of East Asia; "" for all else."""
    if not character.isalpha():
        return ""
    first = unicodedata.name(character, "").split(" ", 1)[0].split("-", 1)[0]
    if first in ("CJK", "IDEOGRAPHIC"):
        return "HAN"
    if first in ("HIRAGANA", "KATAKANA", "HALFWIDTH"):
        return "KANA"
    return first if first in _ONE_LANGUAGE or first in _WRITTEN else ""


def _of_script(script: str, prose: str) -> str:
    """The most probable language of a script that several share."""
    with _lock:
        model = _model(script)
    language, probability = model.classify(" ".join(prose.split()))
    return str(language) if probability >= _MIN_CONFIDENCE else _SINGLE_CANDIDATE.get(script, "")


@functools.cache
def _model(script: str) -> Any:
    """py3langid, choosing among the languages of a script."""
    chosen = copy.copy(_all_languages())
    chosen.set_languages(_WRITTEN[script].split())
    return chosen


@functools.cache
def _all_languages() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
