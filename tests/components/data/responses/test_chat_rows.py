"""A chat becomes rows that show each answer with the text that its model saw."""

from __future__ import annotations

from typing import Any

import pytest
from chat_templates import STYLES, styled_tokenizer

from components.contract import UserError
from components.data.responses.assistant_mask import MaskedChat, mask_chat
from components.data.responses.chat_rows import rows_of_chat, thinking_style
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


@pytest.mark.parametrize("thinking", ["keep", "last"])
def test_a_reasoning_template_gives_each_answer_the_text_that_it_was_given_in(thinking: Thinking) -> None:
    tokenizer = tokenizer_of("qwen3")
    first, second = masked(tokenizer, THOUGHT, thinking)
    assert answers_in(tokenizer, first) == ["<think>\nOne and one.\n</think>\n\nTwo.<|im_end|>"]
    assert answers_in(tokenizer, second) == ["<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>"]
    assert "One and one" not in second.row.text and second.row.suffix == "-1"


def test_dropped_thinking_leaves_an_empty_block_to_the_prompt() -> None:
    tokenizer = tokenizer_of("qwen3")
    rows = masked(tokenizer, THOUGHT, "drop")
    assert [answers_in(tokenizer, row) for row in rows] == [["Two.<|im_end|>"], ["Four.<|im_end|>"]]
    assert all(row.row.text.count("<think>\n\n</think>") == 1 and "One" not in row.row.text for row in rows)


def test_a_template_without_thinking_gets_it_inside_the_answer() -> None:
    tokenizer = tokenizer_of("chatml_marked")
    (kept,) = masked(tokenizer, THOUGHT, "keep")
    thought = [
        "<think>\nOne and one.\n</think>\n\nTwo.<|im_end|>",
        "<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>",
    ]
    assert answers_in(tokenizer, kept) == thought
    first, second = masked(tokenizer, THOUGHT, "last")
    assert answers_in(tokenizer, first) == thought[:1] and answers_in(tokenizer, second) == thought[1:]
    assert "One and one" not in second.row.text


def test_a_template_that_refuses_the_chat_is_one_line() -> None:
    with pytest.raises(UserError, match="alternate"):
        masked(tokenizer_of("mistral"), [TWO_TURNS[1], TWO_TURNS[1], TWO_TURNS[2]])


def test_a_chat_without_answers_has_no_rows() -> None:
    assert masked(tokenizer_of("llama3"), TWO_TURNS[:2]) == []
    empty = [TWO_TURNS[1], {"role": "assistant", "content": "  \n"}]
    assert masked(tokenizer_of("llama3"), empty) == []
