"""A turn in any layout becomes a message, or is refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from components.data.sources.bad_rows import BadRow
from components.data.sources.shapes import read_content

USER = {"role": "user", "content": "Why?"}


ANSWER = {"role": "assistant", "content": "So."}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


def test_calls_in_sharegpt_turns_and_older_forms_become_tool_calls() -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    row = {
        "conversations": said(("human", "Why?"), ("function_call", call), ("observation", "2"), ("gpt", "So.")),
        "tools": json.dumps([TOOL]),
    }
    found = read_content(row)
    assert found.messages == (
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        ANSWER,
    )
    assert json.loads(found.tools) == [TOOL]
    older = {"messages": [USER, {"role": "assistant", "content": None, "function_call": CALL["function"]}]}
    assert read_content(older).messages[1]["tool_calls"] == [CALL]
    assert json.loads(read_content({**older, "functions": [TOOL["function"]]}).tools) == [TOOL]


def test_parts_are_joined_and_reasoning_parts_kept_apart() -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "So"},
        {"type": "output_text", "text": "."},
    ]
    found = read_content({"messages": [USER, {"role": "assistant", "content": parts}]})
    assert found.messages[1] == {"role": "assistant", "content": "So\n.", "reasoning_content": "Hm."}


def test_calls_nested_too_deeply_are_refused_before_a_reader_gives_up() -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    with pytest.raises(BadRow) as refused:
        read_content({"messages": [{**ANSWER, "tool_calls": [{"arguments": deep}]}]})
    assert refused.value.code == "nested_too_deeply"
