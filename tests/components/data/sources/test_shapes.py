"""Every shape of a conversation is read whole, turn by turn, and what is none says why; nothing is made up or lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.sources.bad_rows import BadRow
from components.data.sources.shapes import Content, read_content, read_shape

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "So."}
MORE = {"role": "user", "content": "More?"}
LAST = {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in pairs]


@pytest.mark.parametrize(
    ("row", "shape", "messages"),
    [
        ({"messages": [USER, ANSWER, MORE, LAST]}, "messages", [USER, ANSWER, MORE, LAST]),
        ({"messages": json.dumps([USER, ANSWER])}, "messages", [USER, ANSWER]),
        ({"messages": [{"role": "system", "content": " "}, USER, ANSWER]}, "messages", [USER, ANSWER]),
        ({"prompt": "Why?", "messages": [USER, ANSWER]}, "messages", [USER, ANSWER]),
        ({"custom_id": "1", "body": {"messages": [USER], "model": "m"}}, "messages", [USER]),
        ({"conversations": said(("human", "Why?"), ("gpt", "So."))}, "conversations", [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, "conversations", [USER, ANSWER]),
        ({"conversations": said(("human", "Why?")), "system": "Be brief."}, "conversations", [SYSTEM, USER]),
        ({"conversation": [{"from": None, "value": None, **USER}]}, "conversations", [USER]),
        ({"id": "0", "data": ["Why?", "So.", "More?", "No."]}, "ultrachat", [USER, ANSWER, MORE, LAST]),
        ({"data": [USER, ANSWER]}, "ultrachat", [USER, ANSWER]),
        ({"instruction": "Why?", "input": "", "output": "So."}, "alpaca", [USER, ANSWER]),
        ({"instruction": "", "input": "Why?", "output": "So."}, "alpaca", [USER, ANSWER]),
        (
            {"instruction": "More?", "output": "No.", "system": "Be brief.", "history": [["Why?", "So."]]},
            "alpaca",
            [SYSTEM, USER, ANSWER, MORE, LAST],
        ),
        ({"instruction": "Why?", "response": "So.", "uuid": "x"}, "alpaca", [USER, ANSWER]),
        ({"prompt": "Why?", "response": "So."}, "prompt-response", [USER, ANSWER]),
        ({"prompt": "Why?"}, "prompt-response", [USER]),
        ({"prompt": [USER], "completion": [ANSWER]}, "prompt-response", [USER, ANSWER]),
        ({"question": "Why?", "answer": "So."}, "prompt-response", [USER, ANSWER]),
        ({"system": "Be brief.", "question": "Why?", "answer": "So."}, "prompt-response", [SYSTEM, USER, ANSWER]),
        ({"prompt": "Why?", "chosen": "So.", "rejected": "Nope."}, "preference", [USER, ANSWER]),
        ({"prompt": "Why?", "chosen": [USER, ANSWER], "rejected": [USER, LAST]}, "preference", [USER, ANSWER]),
        ({"prompt": "Why?", "chosen": [ANSWER], "rejected": [LAST]}, "preference", [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "chosen": [ANSWER]}, "preference", [SYSTEM, USER, ANSWER]),
    ],
)  # fmt: skip
def test_a_shape_is_recognised_and_read_whole(row: dict[str, Any], shape: str, messages: list[dict[str, Any]]) -> None:
    assert read_content(row) == Content(shape, "", tuple(messages))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "A page."}, "A page."),
        ({"content": "A page.", "url": "x"}, "A page."),
        ({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}, "def f():\n    return 1\n"),
    ],
)
def test_a_document_stays_plain_text(row: dict[str, Any], text: str) -> None:
    assert read_content(row) == Content("text", text)


def test_tools_calls_and_reasoning_are_kept() -> None:
    turns = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Add.", "tool_calls": [{"id": "1", **CALL}]},
        {"role": "tool", "content": "2", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "<think>Done.</think>Two.", "reasoning": None},
    ]
    found = read_content({"messages": turns, "tools": [TOOL]})
    assert found.messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Add.",
        "tool_calls": [{"id": "1", **CALL}],
    }
    assert found.messages[2] == turns[2]
    assert found.messages[3] == {"role": "assistant", "content": "<think>Done.</think>Two."}
    assert json.loads(found.tools) == [TOOL]


def test_what_a_table_adds_to_every_row_is_no_content() -> None:
    """Parquet gives every turn the fields that one of them has."""
    row = {
        "messages": [{**USER, "tool_calls": None, "name": None}, {**ANSWER, "tool_calls": [], "name": ""}],
        "tools": None,
    }
    assert read_content(row) == Content("messages", "", (USER, ANSWER))


def test_own_fields_are_read_under_their_names() -> None:
    row = {"dlg": [USER, ANSWER], "prompt": "not this"}
    assert read_content(row, {"messages": "dlg"}) == Content("messages", "", (USER, ANSWER))
    assert read_content({"q": "Why?", "a": "So."}, {"prompt": "q", "response": "a"}).messages == (USER, ANSWER)
    with pytest.raises(BadRow, match="no field 'dlg'"):
        read_content({"messages": [USER]}, {"messages": "dlg"})


@pytest.mark.parametrize(
    ("row", "reason", "said_why"),
    [
        ("text", "wrong_type", "object"),
        ({}, "unknown_shape", "no field that says something"),
        ({"other": 1}, "unknown_shape", "other"),
        ({"messages": []}, "wrong_type", "list of turns"),
        ({"messages": "none"}, "wrong_type", "list of turns"),
        ({"messages": "[{"}, "wrong_type", "not valid JSON"),
        ({"messages": "[" * 10_000}, "nested_too_deeply", "nested too deeply"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "unknown_role", "alien"),
        ({"messages": [{"role": "user", "content": 3}]}, "wrong_type", "messages[0].content must be text"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "wrong_type", "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not_text", "image_url"),
        ({"messages": [{**ANSWER, "tool_calls": 5}]}, "wrong_type", "tool_calls"),
        ({"messages": [{**ANSWER, "tool_calls": [{"x": float("nan")}]}]}, "wrong_type", "cannot be written as JSON"),
        ({"conversations": said(("human", "half \ud800"))}, "not_utf8", "surrogate"),
        ({"conversations": said(("human", "a\0b"))}, "nul_characters", "NUL"),
        ({"data": ["Why?", 3]}, "wrong_type", "data[1]"),
        ({"turns": ["Why?", "And now?"]}, "wrong_type", "turns[0] must be an object"),
        ({"instruction": "Why?", "output": 3}, "wrong_type", "response must be text"),
        ({"instruction": "Why?", "output": "So.", "history": [["a"]]}, "wrong_type", "history[0]"),
        ({"prompt": True}, "wrong_type", "true or false"),
        ({"text": "  "}, "empty_text", "empty"),
        ({"messages": [USER], "tools": 3}, "wrong_type", "tools"),
    ],
)
def test_what_is_no_conversation_says_why(row: Any, reason: str, said_why: str) -> None:
    with pytest.raises(BadRow) as refused:
        read_content(row)
    assert refused.value.code == reason
    assert said_why in str(refused.value)


def test_envelopes_inside_envelopes_end() -> None:
    row: Any = {"messages": [USER]}
    for _ in range(500):
        row = {"body": row}
    with pytest.raises(BadRow):
        read_content(row)


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12)
exchanges = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@given(exchanges)
def test_one_conversation_is_the_same_in_every_shape(pairs: list[tuple[str, str]]) -> None:
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    sharegpt = [
        {"from": role, "value": text} for pair in pairs for role, text in zip(("human", "gpt"), pair, strict=True)
    ]
    shapes = [
        {"messages": messages},
        {"conversations": sharegpt},
        {"conversations": messages},
        {"data": [text for pair in pairs for text in pair]},
        {"chosen": messages, "rejected": messages[:-1]},
        {"messages": json.dumps(messages)},
    ]
    if pairs[-1][0].strip():
        history = [list(pair) for pair in pairs[:-1]]
        shapes.append({"instruction": pairs[-1][0], "input": "", "output": pairs[-1][1], "history": history})
    assert {json.dumps(read_content(shape).messages) for shape in shapes} == {json.dumps(tuple(messages))}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [
        *(
            "messages",
            "conversations",
            "data",
            "turns",
            "instruction",
            "input",
            "output",
            "history",
            "prompt",
            "chosen",
        ),
        *("question", "answer", "text", "tools", "system", "body", "functions", "reasoning", "tool_calls", "name"),
    ]
)
turns = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "gpt", "tool", "function_call", "alien"]), "content": json_values},
    optional={"tool_calls": json_values, "function_call": json_values, "thinking": json_values, "name": json_values},
)


@given(st.dictionaries(names, json_values | st.lists(turns, max_size=3), max_size=5))
def test_any_row_is_read_or_refused_in_one_line(row: dict[str, Any]) -> None:
    try:
        found = read_content(row)
    except BadRow as error:
        assert "\n" not in str(error).replace("\\n", "") and error.code
    else:
        assert bool(found.text) != bool(found.messages)
        json.loads(json.dumps(found.messages, allow_nan=False))
        assert all(isinstance(message["content"], str) for message in found.messages)


ASKED = ({"role": "user", "content": "Why?"},)


@pytest.mark.parametrize(
    ("row", "text", "messages", "reference"),
    [
        ({"messages": [*ASKED, {"role": "assistant", "content": "So."}]}, None, ASKED, "So."),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]}, None, ASKED, ""),
        ({"messages": [*ASKED, {"role": "assistant", "content": ""}]}, None, ASKED, ""),
        ({"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]}, None, ASKED, "So."),
        ({"conversations": [{"from": "gpt", "value": "Hi"}, {"from": "human", "value": "Why?"}]}, None, ASKED, ""),
        ({"question_id": 1, "category": "writing", "turns": ["Why?", "And now?"]}, None, ASKED, ""),
        ({"instruction": "Why?", "input": "", "output": "So."}, None, ASKED, "So."),
        ({"question": "Why?", "answer": "So."}, None, ASKED, "So."),
        ({"prompt": "Why?", "response": "So."}, None, ASKED, "So."),
        ({"prompt": "def f():\n", "canonical_solution": "    return 1\n"}, "def f():", None, "\n    return 1\n"),
        ({"turns": ["Why?", "And now?"], "reference": ["So.", "Now."]}, None, ASKED, "So."),
        ({"question": "Why?", "response": "So."}, None, ASKED, "So."),
        ({"messages": [{"role": "User", "content": "Why?", "from": None, "value": None}]}, None, ASKED, ""),
        ({"conversations": [{"from": None, "role": "user", "value": None, "content": "Why?"}]}, None, ASKED, ""),
        ({"text": "从前 有座山山里有座庙庙里有个老和尚"}, "从前 有座山山里有", None, "座庙庙里有个老和尚"),
        ({"prompt": "once upon a time"}, "once upon a time", None, ""),
        ({"text": "one two three four"}, "one two", None, " three four"),
    ],
)
def test_known_shapes(row: dict[str, Any], text: str | None, messages: Any, reference: str) -> None:
    assert read_shape(row) == type(read_shape(row))(text, messages, reference)


def test_system_turn_is_kept_and_later_turns_are_not() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "More"},
    ]
    assert [message["content"] for message in read_shape({"messages": turns}).messages or ()] == ["Be brief.", "Why?"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("text", "object"),
        (None, "object"),
        ({}, "no field"),
        ({"other": 1}, "other"),
        ({"messages": "Why?"}, "list"),
        ({"messages": []}, "list"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "alien"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no turn by the user"),
        ({"messages": ["Why?"]}, "must be an object"),
        ({"messages": [*ASKED, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"prompt": ""}, "empty"),
        ({"prompt": 7}, "a number"),
        ({"prompt": True}, "true or false"),
        ({"question": "Why?", "answer": 3}, "answer must be text"),
        ({"prompt": "half \ud800 character"}, "surrogate"),
        ({"turns": [["x"]]}, "turns[0]"),
    ],
)
def test_wrong_rows_say_why(row: Any, why: str) -> None:
    with pytest.raises(BadRow) as refused:
        read_shape(row)
    assert why in str(refused.value)


fields = st.sampled_from(["messages", "conversations", "turns", "instruction", "prompt", "question", "text", "role"])


@given(st.dictionaries(fields, json_values | st.lists(st.dictionaries(fields, json_values), max_size=2)))
def test_any_row_is_read_or_refused(row: dict[str, Any]) -> None:
    try:
        ask = read_shape(row)
    except BadRow as error:
        assert "\n" not in str(error)
    else:
        assert (ask.text is None) != (ask.messages is None)
        assert ask.text or ask.messages
