"""The chat markup of a target that is trained here: how a chat is written as text, when learning and when asked.

A turn is its role's token, what is said, and the end-of-text token, which ends a turn as well as a document:
    <|bos|><|user|>question<|eos|><|assistant|>answer<|eos|><|user|>...
So generation ends where the assistant's turn ends, with no further rule. `CHAT_TEMPLATE` says the same in Jinja; it
marks the assistant's turns as generated, for whoever makes training masks from a template.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from components.targets.byte_bpe import BOS, EOS, PAD

ROLES: Final = ("system", "user", "assistant", "tool")
ROLE_TOKENS: Final = tuple(f"<|{role}|>" for role in ROLES)
ANSWER_BEGINS: Final = re.compile(re.escape("<|assistant|>"))
MARKUP: Final = "roles"
"""What a Corpus says in its facts (`markup`) when its documents are written so."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SPECIAL: Final = re.compile("|".join(map(re.escape, (BOS, EOS, PAD, *ROLE_TOKENS))))


def chat_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A chat as a document of a corpus: without the first BOS and the last EOS, which every document gets anyway.

    Markup inside what people say is broken by blanks, so that nobody can speak for somebody else.
    """
    turns = [f"<|{message['role']}|>{without_markup(message['content'])}" for message in messages]
    return EOS.join(turns)


def without_markup(text: str) -> str:
    """The text with every special token in it written apart: <|eos|> becomes <| eos |>."""
    return _SPECIAL.sub(lambda found: f"<| {found[0][2:-2]} |>", text)


def said_in(document: str) -> list[str]:
    """The pieces of a document between its special tokens: what a tokenizer's merges are to be learnt from."""
    return [piece for piece in _SPECIAL.split(document) if piece]
