"""The shapes in which people keep conversations, recognised row by row and unified into whole ones, every turn of them.

    messages         OpenAI: [{"role", "content"}], with "tools"; also inside "body" or "request" of logged requests
    conversations    ShareGPT: [{"from", "value"}], with "system" and "tools"; MAGPIE and PerfectBlend keep it so
    data             UltraChat: ["question", "answer", "question", ...]
    instruction      Alpaca: with "input", "output", "system" and "history" [[question, answer], ...]
    prompt + answer  response, completion, output, answer, or "chosen" of a preference pair (not the rejected one)
    text             a plain document

Fields decide, in this order, as of the first that is not null; `fields` renames those of somebody's own shape. What is
recognised keeps its order and, but for an empty system prompt, its empty turns: cleaning.py says what is worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from components.data.chat_turns import REASONING, BadRow, checked, checked_json, first_of, kind_of, parsed, read_turn

Shape = Literal["messages", "conversations", "ultrachat", "alpaca", "prompt-response", "preference", "text"]
Field = Literal["messages", "prompt", "response", "system", "tools", "text"]
"""What `fields` may rename: one's own name for the list of turns, the question, the answer and so on."""

_ENVELOPES: Final = ("body", "request")
"""Where logs of servers keep what was asked: OpenAI's batch files in "body", many gateways in "request"."""
_AS_TEXT: Final = (*_ENVELOPES, "messages", "conversations")
"""Fields that tables often hold as JSON text."""
_TURN_LISTS: Final = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_QUESTIONS: Final = ("prompt", "question", "query", "problem", "input")
_ANSWERS: Final = ("response", "completion", "answer", "output", "solution", "chosen")
_SYSTEMS: Final = ("system", "system_prompt", "system_message")
_EXPECTED: Final = "messages, conversations, data, instruction, prompt or question with an answer, text"


@dataclass(frozen=True)
class Content:
    """What a row says: a document (`text`) or a conversation (`messages`), exactly one of the two."""

    shape: Shape
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: str = ""


def read_content(row: Any, fields: Mapping[Field, str] | None = None) -> Content:
    """Recognise a row; raises BadRow for anything that is none of the known shapes, or holds what is no text.

    fields: standard field -> the row's own name for it.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be an object with fields, this is {kind_of(row)}")
    row = open_row(_renamed(row, fields) if fields else row)
    content = _recognised(row)
    if not content.messages:
        return content
    system = first_of(row, *_SYSTEMS)
    messages = content.messages
    if messages[0]["role"] == "system" and not messages[0]["content"].strip() and len(messages) > 1:
        messages = messages[1:]  # a form with nothing filled in
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": checked(system, "system")}, *messages)
    return Content(content.shape, "", messages, _tools(row))


def open_row(row: Mapping[str, Any], depth: int = 3) -> Mapping[str, Any]:
    """A logged request without its envelope, and JSON text in the fields that tables keep so as what it says.

    depth: envelopes inside envelopes that are opened at most.
    """
    opened = dict(row)
    for field in _AS_TEXT:
        value = opened.get(field)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            opened[field] = parsed(value, field)
    for field in _ENVELOPES:
        inside = opened.get(field)
        if depth and isinstance(inside, Mapping) and "messages" not in opened and "prompt" not in opened:
            return open_row(inside, depth - 1)
    return opened


def _recognised(row: Mapping[str, Any]) -> Content:
    for field in _TURN_LISTS:
        if row.get(field) is not None:
            return Content("messages" if field == "messages" else "conversations", "", _turns(row[field], field))
    if row.get("data") is not None:
        return Content("ultrachat", "", _alternating(row["data"], "data"))
    if row.get("turns") is not None:
        return Content("conversations", "", _turns(row["turns"], "turns"))
    if row.get("instruction") is not None:
        return Content("alpaca", "", _alpaca(row))
    if isinstance(row.get("chosen"), list):
        return Content("preference", "", _preferred(row))
    if row.get("prompt") is not None and row.get("canonical_solution") is not None:
        text = checked(row["prompt"], "prompt") + checked(row["canonical_solution"], "canonical_solution")
        return _document(text)
    if (question := first_of(row, *_QUESTIONS)) is not None:
        shape: Shape = "preference" if row.get("chosen") is not None else "prompt-response"
        return Content(shape, "", _exchange(question, first_of(row, *_ANSWERS), first_of(row, *REASONING)))
    if (text := first_of(row, "text", "content")) is not None:
        return _document(checked(text, "text"))
    names = ", ".join(sorted(map(str, row))[:8])[:200] or "none"
    raise BadRow(f"no field that says something (has: {names}; expected {_EXPECTED})", "unknown_shape")


def _document(text: str) -> Content:
    if not text.strip():
        raise BadRow("text is empty", "empty_text")
    return Content("text", text)


def _turns(turns: Any, field: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of turns, this is {kind_of(turns)}")
    names = ("from", "value") if isinstance(turns[0], Mapping) and "from" in turns[0] else ("role", "content")
    return tuple(read_turn(turn, f"{field}[{number}]", *names) for number, turn in enumerate(turns))


def _alternating(turns: Any, field: str) -> tuple[dict[str, Any], ...]:
    """UltraChat: texts of user and assistant in turn; a list of objects is a list of turns after all."""
    if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
        return _turns(turns, field)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of texts, this is {kind_of(turns)}")
    texts = (checked(text, f"{field}[{number}]") for number, text in enumerate(turns))
    return tuple({"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts))


def _alpaca(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    before: list[dict[str, Any]] = []
    history = row.get("history")
    if history:
        if not isinstance(history, list):
            raise BadRow(f"history must be a list of [question, answer], this is {kind_of(history)}")
        for number, pair in enumerate(history):
            if not isinstance(pair, list) or len(pair) != 2:
                raise BadRow(f"history[{number}] must be [question, answer], this is {kind_of(pair)}")
            before += _alternating(pair, f"history[{number}]")
    question, extra = checked(row["instruction"], "instruction"), row.get("input")
    if extra:
        question = f"{question}\n\n{checked(extra, 'input')}" if question.strip() else checked(extra, "input")
    return (*before, *_exchange(question, first_of(row, "output", "response", "answer", "completion")))


def _preferred(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The chosen conversation; where it holds the answer alone, the prompt comes before it."""
    chosen, prompt = _turns(row["chosen"], "chosen"), row.get("prompt")
    if any(message["role"] == "user" for message in chosen) or prompt is None:
        return chosen
    asked = _turns(prompt, "prompt") if isinstance(prompt, list) else _exchange(prompt, None)
    return (*asked, *chosen)


def _exchange(question: Any, answer: Any, reasoning: Any = None) -> tuple[dict[str, Any], ...]:
    """A question and its answer, where there is one; either may be a list of turns."""
    if isinstance(question, list):
        asked = _turns(question, "prompt")
    else:
        asked = ({"role": "user", "content": checked(question, "prompt")},)
    if answer is None:
        return asked
    if isinstance(answer, list):
        return (*asked, *_turns(answer, "response"))
    said = {"role": "assistant", "content": checked(answer, "response")}
    thought = {"reasoning_content": checked(reasoning, "reasoning")} if reasoning else {}
    return (*asked, {**said, **thought})


def _tools(row: Mapping[str, Any]) -> str:
    """The tools that were offered, as JSON; OpenAI's older `functions` in the form of `tools`."""
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return ""
        tools = parsed(tools, "tools")
    if not tools and isinstance(row.get("functions"), Sequence) and not isinstance(row["functions"], str):
        tools = [{"type": "function", "function": function} for function in row["functions"]]
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow(f"tools must be a list of objects, this is {kind_of(tools)}")
    return checked_json(tools, "tools")


def _renamed(row: Mapping[str, Any], fields: Mapping[Field, str]) -> Mapping[str, Any]:
    """The row with the standard names for its own; what `fields` does not name decides nothing any more."""
    kept: dict[str, Any] = {}
    for standard, own in fields.items():
        if own not in row:
            has = ", ".join(sorted(map(str, row))[:8])[:200] or "none"
            raise BadRow(f"no field {own!r:.40} (has: {has})", "unknown_shape")
        kept[standard] = row[own]
    return kept
