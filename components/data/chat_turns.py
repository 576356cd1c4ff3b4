"""One turn of a conversation in whatever fields people keep it, as one message: role, content, reasoning, tool calls.

Roles of every tradition become system, user, assistant and tool. Calls of tools and what a model thought before it
answered (`reasoning_content`, `reasoning`, `thinking`) are kept in fields of their own; a <think> block inside the text
stays where it is. What cannot be text is refused with the reason, never turned into some text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "function_call": "call",
    "tool_call": "call",
}
"""Role as written, in lower case -> role. "call": the turn is the call of a tool, which the assistant makes."""
REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
_REASONING_PARTS: Final = ("thinking", "reasoning")
_MAX_DEPTH: Final = 48


class BadRow(ValueError):
    """This row cannot be used; the message says why in one line, `reason` is the same for all rows with this fault."""

    def __init__(self, message: str, reason: str = "wrong_type") -> None:
        super().__init__(message)
        self.reason = reason


def read_turn(turn: Any, where: str, role_field: str = "role", text_field: str = "content") -> dict[str, Any]:
    """{"role", "content"} and, where there are some, reasoning_content, tool_calls, tool_call_id and name.

    where: what messages call it, such as "messages[3]". Raises BadRow for what is no turn.
    """
    if not isinstance(turn, Mapping):
        raise BadRow(f"{where} must be an object with {role_field} and {text_field}, this is {kind_of(turn)}")
    role = role_of(turn, where, role_field)
    content, thought = _content(first_of(turn, text_field, "content", "value", "text"), f"{where}.{text_field}")
    calls = _calls(turn, where)
    if role == "call":
        role = "assistant"
        if not calls and (named := _call_in_text(content)) is not None:
            content, calls = "", named
    message: dict[str, Any] = {"role": role, "content": content if content is not None else ""}
    if content is None and not calls:
        raise BadRow(f"{where}.{text_field} must be text, this is empty")
    reasoning = first_of(turn, *REASONING)
    thought = checked(reasoning, f"{where}.reasoning") if reasoning else thought
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    for field in ("tool_call_id", "name"):
        if turn.get(field):
            message[field] = checked(turn[field], f"{where}.{field}")
    return message


def role_of(turn: Mapping[str, Any], where: str, role_field: str) -> str:
    """The role of a turn; "call" for the call of a tool. Raises BadRow for one that nobody knows."""
    role = first_of(turn, role_field, "role", "from")
    known = ROLES.get(role.strip().lower()) if isinstance(role, str) else None
    if known is None:
        raise BadRow(f"{where}: unknown role {role!r:.40}; known: {', '.join(sorted(ROLES))}", "unknown_role")
    return known


def first_of(row: Mapping[str, Any], *fields: str) -> Any:
    """The first of `fields` that is not null: a table that mixes two formats has the fields of both."""
    return next((row[field] for field in fields if row.get(field) is not None), None)


def joined_parts(content: Any) -> Any:
    """OpenAI's list of parts as one text; what is not such a list is returned as it is, to be refused by `checked`."""
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") in _TEXT_PARTS]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    return content


def checked(value: Any, where: str) -> str:
    """A text that can be stored and tokenised; raises BadRow for anything else. It may be empty."""
    if not isinstance(value, str):
        raise BadRow(f"{where} must be text, this is {kind_of(value)}")
    if "\0" in value:
        raise BadRow(f"{where} holds NUL characters", "nul_characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow(f"{where} holds what is not UTF-8 text (a lone surrogate)", "not_utf8") from None
    return value


def checked_json(value: Any, where: str) -> str:
    """Tools or calls as JSON text; raises BadRow where they are none, or nested so deeply that readers give up."""
    if _deeper_than(value, _MAX_DEPTH):
        raise BadRow(f"{where} is nested too deeply", "nested_too_deeply")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode("utf-8")
    except (TypeError, ValueError) as error:  # bytes or dates of a table, NaN, half a character
        raise BadRow(f"{where} cannot be written as JSON ({type(error).__name__})") from error
    return text


def kind_of(value: Any) -> str:
    """What a value is, for people."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    if value is None:
        return "empty"
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), type(value).__name__)


def _content(content: Any, where: str) -> tuple[str | None, str]:
    """(text, reasoning among its parts). None: there is no content."""
    if content is None:
        return None, ""
    thought = ""
    if isinstance(content, list):
        if not content:
            return "", ""
        thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS]
        said = [first_of(part, "thinking", "reasoning", "text") for part in thoughts]
        thought = "\n".join(checked(text, f"{where} (reasoning)") for text in said)
        content = [part for part in content if not (isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS)]
        others = [part.get("type") for part in content if isinstance(part, Mapping)]
        if odd := [kind for kind in others if kind not in _TEXT_PARTS]:
            raise BadRow(f"{where} holds a part of type {odd[0]!r:.40}; only text is kept", "not_text")
        content = joined_parts(content) if content else ""
    return checked(content, where), thought


def _calls(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Calls of tools in OpenAI's form; a lone `function_call` of its older form counts as one."""
    calls = turn.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        calls = parsed(calls, f"{where}.tool_calls")
    if not calls and isinstance(turn.get("function_call"), Mapping):
        calls = [{"type": "function", "function": turn["function_call"]}]
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow(f"{where}.tool_calls must be a list of objects, this is {kind_of(calls)}")
    kept = [_without_nulls(call) for call in calls]
    checked_json(kept, f"{where}.tool_calls")
    return kept


def _without_nulls(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call without the fields that a table adds to every row; what stands in its arguments stays."""
    kept = {name: value for name, value in call.items() if value is not None}
    if isinstance(kept.get("function"), Mapping):
        kept["function"] = {name: value for name, value in kept["function"].items() if value is not None}
    return kept


def _call_in_text(content: str | None) -> list[dict[str, Any]] | None:
    """ShareGPT's function_call turns hold {"name", "arguments"} as JSON text; None where it is something else.

    Raises BadRow for what JSON text can escape and nobody can store: half a character, NaN.
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
    checked_json(calls, "function_call")
    return [{"type": "function", "function": call} for call in calls]


def parsed(text: str, where: str) -> Any:
    """JSON text in a field as what it says; raises BadRow where it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise BadRow(f"{where} is nested too deeply", "nested_too_deeply") from None
    except ValueError as error:
        raise BadRow(f"{where} is not valid JSON ({type(error).__name__})") from error


def _deeper_than(value: Any, depth: int) -> bool:
    """Whether lists and objects stand in one another more than `depth` times; level by level, so that it ends."""
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
