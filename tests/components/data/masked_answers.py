"""Chats, templates, and the answers that a mask marks in them."""

from __future__ import annotations

from typing import Any

from chat_templates import STYLES, styled_tokenizer

from components.data.responses.assistant_mask import MaskedChat, mask_chat, rows_of_chat, thinking_style
from components.data.settings import Thinking, Turns

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "The air scatters blue.\n\nMost of it."},
    {"role": "user", "content": "天空？"},
    {"role": "assistant", "content": "天空是蓝色的。👩‍👩‍👧"},
]


THOUGHT = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."},
]


TOKENIZERS: dict[str, Any] = {}


def tokenizer_of(name: str) -> Any:
    if name not in TOKENIZERS:
        TOKENIZERS[name] = styled_tokenizer(STYLES[name])
    return TOKENIZERS[name]


def masked(
    tokenizer: Any,
    chat: list[dict[str, Any]],
    thinking: Thinking = "drop",
    turns: Turns = "all",
    tools: tuple[dict[str, Any], ...] | None = None,
) -> list[MaskedChat]:
    style = thinking_style(tokenizer)
    return [mask_chat(row) for row in rows_of_chat(tokenizer, chat, tools, thinking=thinking, turns=turns, style=style)]


def answers_in(tokenizer: Any, found: MaskedChat) -> list[str]:
    """The text of each run of answer tokens."""
    runs: list[list[int]] = []
    for index, answer in enumerate(found.mask):
        if answer and index and found.mask[index - 1]:
            runs[-1].append(found.ids[index])
        elif answer:
            runs.append([found.ids[index]])
    return [tokenizer.decode(run) for run in runs]
