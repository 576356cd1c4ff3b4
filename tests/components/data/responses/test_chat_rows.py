"""A chat becomes rows that show each answer with the text that its model saw."""

from __future__ import annotations

import pytest
from masked_answers import THOUGHT, TWO_TURNS, answers_in, masked, tokenizer_of

from components.contract import UserError
from components.data.settings import Thinking


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
