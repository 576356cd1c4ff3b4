"""Conversion between token ids and text, for servers that take or return text only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_of(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """A text that the server's tokenizer encodes to exactly these ids; None where there is none.

    The text omits a beginning-of-text token that the tokenizer adds, because the server adds it too.
    """
    expected = list(ids)
    beginning = getattr(tokenizer, "bos_token_id", None)
    for part in (expected, expected[1:] if expected and expected[0] == beginning else expected):
        text: str = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer(text, verbose=False)["input_ids"]) == expected:
            return text
    return None


def ids_of_answer(tokenizer: Any, prompt_text: str, prompt_ids: Sequence[int], answer: str) -> list[int] | None:
    """Token ids for an answer's text; None where no ids decode to exactly this text.

    The answer is tokenised behind its prompt, so that a token which begins with a space keeps it, and by itself where a
    token would span both.
    """
    start = list(prompt_ids)
    together = list(tokenizer(prompt_text + answer, verbose=False)["input_ids"])
    if together[: len(start)] == start:
        return together[len(start) :]
    alone = list(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
    back = tokenizer.decode(alone, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return alone if back == answer else None
