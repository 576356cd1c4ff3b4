"""Converts one turn of a conversation in any common layout to a message: role, content, reasoning, tool calls.

All role names become system, user, assistant or tool. Tool calls and a model's thinking (`reasoning_content`,
`reasoning`, `thinking`) get fields of their own; a <think> block inside the text stays where it is. A value that is not
text is refused with a reason, never converted to text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from components.data.sources.bad_rows import BadRow, Row
from components.outside_json import JsonObject

Message = JsonObject
"""{"role", "content"} and, where present, reasoning_content, tool_calls, tool_call_id and name."""
ToolCall = JsonObject
"""A tool call in OpenAI's form: {"type": "function", "function": {"name", "arguments"}} and, where present, "id"."""
ROLES: Final = {
    name: role
    for role, names in {
        "system": "system developer",
        "user": "user human prompter",
        "assistant": "assistant gpt chatgpt bard bing bot model",
        "tool": "tool function observation tool_response function_response ipython",
        "call": "function_call tool_call",
    }.items()
    for name in names.split()
}
"""Role as written, in lower case -> role. "call": the turn is a tool call by the assistant."""
REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_REASONING_PARTS: Final = ("thinking", "reasoning")
_MAX_DEPTH: Final = 48


def read_turn(turn: Any, location: str, role_field: str = "role", text_field: str = "content") -> Message:
    """The message of a turn; raises BadRow where the value is not a turn.

    location: the turn's name in error messages, such as "messages[3]".
    """
    if not isinstance(turn, Mapping):
        raise BadRow(f"{location} must be an object with {role_field} and {text_field}, this is {type_name(turn)}")
    role = role_of(turn, location, role_field)
    content, thought = _content(first_of(turn, text_field, "content", "value", "text"), f"{location}.{text_field}")
    calls = _calls(turn, location)
    if role == "call":
        role = "assistant"
        if not calls and (named := _call_in_text(content)) is not None:
            content, calls = "", named
    message: Message = {"role": role, "content": content if content is not None else ""}
    if content is None and not calls:
        raise BadRow(f"{location}.{text_field} must be text, this is empty")
    reasoning = first_of(turn, *REASONING)
    thought = valid_text(reasoning, f"{location}.reasoning") if reasoning else thought
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    for field in ("tool_call_id", "name"):
        if turn.get(field):
            message[field] = valid_text(turn[field], f"{location}.{field}")
    return message


def role_of(turn: Row, location: str, role_field: str) -> str:
    """The role of a turn; "call" for a tool call. Raises BadRow for an unknown role."""
    role = first_of(turn, role_field, "role", "from")
    standard_role = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if standard_role is None:
        raise BadRow(f"{location}: unknown role {role!r:.40}; known: {', '.join(sorted(ROLES))}", "unknown_role")
    return standard_role


def first_of(row: Row, *fields: str) -> Any:
    """The value of the first of `fields` that is not null: a table that mixes two formats has the fields of both."""
    return next((row[field] for field in fields if row.get(field) is not None), None)


def join_parts(content: Any) -> Any:
    """The text of OpenAI's list of parts; any other value is returned unchanged, to be refused by `valid_text`."""
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") in _TEXT_PARTS]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    return content


def valid_text(value: Any, location: str) -> str:
    """The value, if it is text that can be stored and tokenised (it may be empty); raises BadRow for anything else."""
    if not isinstance(value, str):
        raise BadRow(f"{location} must be text, this is {type_name(value)}")
    if "\0" in value:
        raise BadRow(f"{location} holds NUL characters", "nul_characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(f"{location} holds what is not UTF-8 text (a lone surrogate)", "not_utf8") from None
    return value


def json_text(value: Any, location: str) -> str:
    """Tools or calls as JSON text; raises BadRow where that is impossible, or the nesting is too deep for readers."""
    if _deeper_than(value, _MAX_DEPTH):
        raise BadRow(f"{location} is nested too deeply", "nested_too_deeply")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode("utf-8")
    except (TypeError, ValueError) as error:  # bytes or dates of a table, NaN, half a character
        raise BadRow(f"{location} cannot be written as JSON ({type(error).__name__})") from error
    return text


def field_names(row: Row) -> str:
    """The first names of a row's fields, for error messages."""
    return ", ".join(sorted(map(str, row))[:8])[:200] or "none"


def type_name(value: Any) -> str:
    """The type of a value, for error messages."""
    names = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    if value is None:
        return "empty"
    if isinstance(value, list) and not value:
        return "an empty list"
    return "a number" if type(value) in (int, float) else names.get(type(value), type(value).__name__)


def _content(content: Any, location: str) -> tuple[str | None, str]:
    """(text, reasoning among its parts). None: there is no content."""
    if content is None:
        return None, ""
    thought = ""
    if isinstance(content, list):
        if not content:
            return "", ""
        thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS]
        thought_texts = [first_of(part, "thinking", "reasoning", "text") for part in thoughts]
        thought = "\n".join(valid_text(text, f"{location} (reasoning)") for text in thought_texts)
        content = [part for part in content if not (isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS)]
        others = [part.get("type") for part in content if isinstance(part, Mapping)]
        if odd := [kind for kind in others if kind not in _TEXT_PARTS]:
            raise BadRow(f"{location} holds a part of type {odd[0]!r:.40}; only text is kept", "not_text")
        content = join_parts(content) if content else ""
    return valid_text(content, location), thought


def _calls(turn: Row, location: str) -> list[ToolCall]:
    """Tool calls in OpenAI's form; its older `function_call` is converted to one call."""
    calls = turn.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        calls = parse_json(calls, f"{location}.tool_calls")
    if not calls and isinstance(turn.get("function_call"), Mapping):
        calls = [{"type": "function", "function": turn["function_call"]}]
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow(f"{location}.tool_calls must be a list of objects, this is {type_name(calls)}")
    compact_calls = [_without_nulls(call) for call in calls]
    json_text(compact_calls, f"{location}.tool_calls")
    return compact_calls


def _without_nulls(call: Row) -> ToolCall:
    """A call without the null fields that a table adds to every row; its arguments are unchanged."""
    fields = {name: value for name, value in call.items() if value is not None}
    if isinstance(fields.get("function"), Mapping):
        fields["function"] = {name: value for name, value in fields["function"].items() if value is not None}
    return fields


def _call_in_text(content: str | None) -> list[ToolCall] | None:
    """The calls in a ShareGPT function_call turn, {"name", "arguments"} as JSON text; None for any other text.

    Raises BadRow for values that JSON text can express but that cannot be stored: a lone surrogate, NaN.
    """
    try:
        value = json.loads(content or "")
    except (ValueError, RecursionError):
        return None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    if _deeper_than(calls, _MAX_DEPTH):
        return None
    json_text(calls, "function_call")
    return [{"type": "function", "function": call} for call in calls]


def parse_json(text: str, location: str) -> Any:
    """The value of JSON text in a field; raises BadRow where it is not valid."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadRow(f"{location} is nested too deeply", "nested_too_deeply") from None
    except ValueError as error:
        raise BadRow(f"{location} is not valid JSON ({type(error).__name__})") from error


def _deeper_than(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than `depth` levels deep; checked without recursion."""
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return False
        level = inner
    return True
