"""Token ids and text, there and back: for servers that take or give text only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_of(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """A text that the server's tokenizer will turn into just these ids; None where there is none.

    A server adds the beginning-of-text token itself where the tokenizer does, so it is left out of the text then.
    """
    wanted = list(ids)
    beginning = getattr(tokenizer, "bos_token_id", None)
    for part in (wanted, wanted[1:] if wanted and wanted[0] == beginning else wanted):
        shown: str = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer(shown, verbose=False)["input_ids"]) == wanted:
            return shown
    return None


def ids_of_answer(tokenizer: Any, prompt_text: str, prompt_ids: Sequence[int], answer: str) -> list[int] | None:
    """The tokens of an answer of which only the text is known; None where no tokens make just this text.

    Tokenised behind its prompt, so that a token which begins with a space keeps it; by itself where prompt and answer
    would grow together.
    """
    start = list(prompt_ids)
    together = list(tokenizer(prompt_text + answer, verbose=False)["input_ids"])
    if together[: len(start)] == start:
        return together[len(start) :]
    alone = list(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
    back = tokenizer.decode(alone, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return alone if back == answer else None
