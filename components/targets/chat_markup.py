"""The chat markup of a target that is trained here: how a chat is written as text, in training and in prompts.

A turn is its role's token, its content, and the end-of-text token, which ends a turn as well as a document:
    <|bos|><|user|>question<|eos|><|assistant|>answer<|eos|><|user|>...
So generation ends where the assistant's turn ends. `CHAT_TEMPLATE` is the same markup in Jinja; it
marks the assistant's turns as generated, so that training masks can be made from the template.
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
"""The value of `markup` in the facts of a Corpus whose documents use this markup."""

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_SPECIAL: Final = re.compile("|".join(map(re.escape, (BOS, EOS, PAD, *ROLE_TOKENS))))


def chat_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A chat as a corpus document, without the first BOS and last EOS, which are added to every document.

    Markup inside a message is broken by blanks, so that its author cannot write a turn of another role.
    """
    turns = [f"<|{message['role']}|>{without_markup(message['content'])}" for message in messages]
    return EOS.join(turns)


def without_markup(text: str) -> str:
    """The text with blanks inside every special token: <|eos|> becomes <| eos |>."""
    return _SPECIAL.sub(lambda match: f"<| {match[0][2:-2]} |>", text)


def text_pieces(document: str) -> list[str]:
    """The pieces of a document between its special tokens, from which a tokenizer learns its merges."""
    return [piece for piece in _SPECIAL.split(document) if piece]
