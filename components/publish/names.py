"""Public names: of models, files and settings without this machine's folders, and the search for a private name.

A path is useless elsewhere and may be private: in a release, except in draftsmith/, it is replaced by its last part.
Before an upload, the release is searched once more (release/public_copy.py).

A private name is found as whole words: `Secret-LLM` in `secret_llm_chats.jsonl`, `models--a--secret-llm` and
`acme%2Fsecret%2Dllm`, but not `llama` in `LlamaForCausalLM`. Escapes of JSON and of addresses are decoded, and text is
compared by NFKC and case folding, so that a composed letter equals a decomposed one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from components.outside_json import JsonObject

DATA_SET = "hf:"  # a data set in Hugging Face format, on the hub or in a folder
_LOCAL = re.compile(r"^(?:[/~.]|[A-Za-z]:[\\/])")
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]*://")
_IN_TEXT = re.compile(r"[a-z][a-z0-9+.-]*://[^\s\"']+|(?<![\w./:<-])/(?:[\w.@+-]+/)+[\w.@+-]*")
_RELATIVE_FILE = re.compile(r"^[^\s:]*/[^\s:]*\.[A-Za-z0-9]{1,8}$")


def public_name(model: str) -> str:
    """A hub id or "builtin" as it is, a folder or an address by its last part."""
    if model.startswith(DATA_SET):
        return DATA_SET + public_name(model.removeprefix(DATA_SET))
    if _ADDRESS.match(model):
        return Path(urlsplit(model).path.rstrip("/")).name or "an address"
    if _LOCAL.match(model):
        return Path(model.replace("\\", "/")).name
    here = model not in ("", "builtin") and len(model) < 256 and Path(model).is_dir()
    return Path(model).name if here else model


def public_settings(settings: Mapping[str, Any]) -> JsonObject:
    """A drafter's settings with its given draft model by its public name."""
    public = {"model": public_name(str(settings["model"]))} if settings.get("model") else {}
    return {**settings, **public}


def public_value(value: Any) -> Any:
    """Settings or facts of a step with every path and address, also inside texts, replaced by its last part."""
    if isinstance(value, Mapping):
        return {str(name): public_value(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [public_value(one) for one in value]
    if isinstance(value, str):
        short = Path(value).name if _RELATIVE_FILE.match(value) else public_name(value)
        return _IN_TEXT.sub(lambda match: public_name(match[0]), short)
    return value


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
