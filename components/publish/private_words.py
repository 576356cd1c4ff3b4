"""Does a text name a private target? By any of its names, in any case, alphabet form, escape or spelling of separators.

A name is found where it stands as words of its own: `Secret-LLM` in `secret_llm_chats.jsonl`, `models--a--secret-llm`
and `acme%2Fsecret%2Dllm`, but `llama` not in `LlamaForCausalLM`. Escapes of JSON and of addresses are undone, and
Unicode is compared by NFKC and case folding, so that a composed letter is the same as a decomposed one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection, Iterator
from urllib.parse import unquote

_ESCAPE = re.compile(r"(?:\\+u[0-9a-fA-F]{4})+")
_SEPARATORS = re.compile(r"[-_./\s]+")
TELLING = 8
"""Letters from which on a name of several words is known without anything between them: secretllm, not x7b."""


def named_in(text: str, names: Collection[str], *, parts_of_words: bool = False) -> str:
    """The first of the names that a text has in it, as it was given; "" for none.

    parts_of_words: in the middle of a word as well, as an address is read.
    """
    for reading in _readings(text):
        for name in names:
            if _words(name, parts_of_words).search(reading):
                return name
    return ""


@functools.lru_cache(maxsize=64)
def _words(name: str, parts_of_words: bool) -> re.Pattern[str]:
    """A name's words with any one or two separators between them, or none where they are long enough together."""
    folded = _folded(name)
    words = [re.escape(word) for word in _SEPARATORS.split(folded) if word]
    space = r"\s" if re.search(r"\s", folded) else ""
    least = 0 if sum(map(len, words)) >= TELLING else 1
    inner = rf"[-_./{space}]{{{least},2}}".join(words) if words else re.escape(folded)
    # An underscore is no part of a word here: secret_chats.jsonl names what is called secret.
    return re.compile(inner if parts_of_words else rf"(?<![^\W_]){inner}(?![^\W_])")


def _readings(text: str) -> Iterator[str]:
    """A text as it is, and with its escapes undone where it has any."""
    yield _folded(text)
    plain = _ESCAPE.sub(_unescaped, text)
    if "%" in plain:
        yield _folded(unquote(plain))
    if plain != text:
        yield _folded(plain)


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _unescaped(found: re.Match[str]) -> str:
    units = re.findall(r"u([0-9a-fA-F]{4})", found[0])
    return bytes.fromhex("".join(units)).decode("utf-16-be", errors="replace")
