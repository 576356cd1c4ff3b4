"""Search a text for the names of a private target, in any case, Unicode form, escape or spelling of separators.

A name is found as whole words: `Secret-LLM` in `secret_llm_chats.jsonl`, `models--a--secret-llm` and
`acme%2Fsecret%2Dllm`, but not `llama` in `LlamaForCausalLM`. Escapes of JSON and of addresses are decoded, and text is
compared by NFKC and case folding, so that a composed letter equals a decomposed one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection, Iterator
from urllib.parse import unquote

_ESCAPE = re.compile(r"(?:\\+u[0-9a-fA-F]{4})+")
_SEPARATORS = re.compile(r"[-_./\s]+")
MIN_JOINED_LETTERS = 8
"""Least letters of a name of several words that is also found without separators: secretllm, but not x7b."""


def find_name(text: str, names: Collection[str], *, parts_of_words: bool = False) -> str:
    """The first of the names that occurs in a text; "" for none.

    parts_of_words: find it in the middle of a word as well, as in an address.
    """
    for reading in _spellings(text):
        for name in names:
            if _name_pattern(name, parts_of_words).search(reading):
                return name
    return ""


@functools.lru_cache(maxsize=64)
def _name_pattern(name: str, parts_of_words: bool) -> re.Pattern[str]:
    """Pattern of a name's words with one or two separators between them, or none where the name is long enough."""
    folded = _fold(name)
    words = [re.escape(word) for word in _SEPARATORS.split(folded) if word]
    space = r"\s" if re.search(r"\s", folded) else ""
    least = 0 if sum(map(len, words)) >= MIN_JOINED_LETTERS else 1
    inner = rf"[-_./{space}]{{{least},2}}".join(words) if words else re.escape(folded)
    # An underscore separates words here: secret_chats.jsonl contains the name secret.
    return re.compile(inner if parts_of_words else rf"(?<![^\W_]){inner}(?![^\W_])")


def _spellings(text: str) -> Iterator[str]:
    """The folded text, and the same with its escapes decoded where it has any."""
    yield _fold(text)
    plain = _ESCAPE.sub(_decode_escape, text)
    if "%" in plain:
        yield _fold(unquote(plain))
    if plain != text:
        yield _fold(plain)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _decode_escape(match: re.Match[str]) -> str:
    units = re.findall(r"u([0-9a-fA-F]{4})", match[0])
    return bytes.fromhex("".join(units)).decode("utf-16-be", errors="replace")
