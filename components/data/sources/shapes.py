"""The shapes in which rows store a conversation: `read_content` reads all of one, `read_shape` its first question.

    messages         OpenAI: [{"role", "content"}], with "tools"; also inside "body" or "request" of logged requests
    conversations    ShareGPT: [{"from", "value"}], with "system" and "tools"; MAGPIE and PerfectBlend keep it so
    data             UltraChat: ["question", "answer", "question", ...]
    turns            MT-Bench, Spec-Bench: the user's turns
    instruction      Alpaca: with "input", "output", "system" and "history" [[question, answer], ...]
    prompt + answer  response, completion, output, answer, or "chosen" of a preference pair (not the rejected one)
    prompt + canonical_solution   HumanEval
    text             a plain document

The first of these fields that is not null decides the shape, row by row; other rows are refused with the reason, and
`fields` renames the fields of any other shape. Turns keep their order, and empty turns are kept except for an empty
system prompt: cleaning/rules.py decides what to drop. `read_shape` takes only the first exchange of a chat, since later
turns answer another model. Roles and texts are read by turns.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from components.data.settings import FieldName
from components.data.sources.bad_rows import BadRow, Row
from components.data.sources.turns import (
    REASONING,
    Message,
    field_names,
    first_of,
    join_parts,
    json_text,
    parse_json,
    read_turn,
    role_of,
    type_name,
    valid_text,
)
from components.outside_json import JsonObject

Shape = Literal["messages", "conversations", "ultrachat", "alpaca", "prompt-response", "preference", "text"]

_ENVELOPES: Final = ("body", "request")
"""Fields in which server logs store the request: OpenAI's batch files use "body", many gateways "request"."""
_AS_TEXT: Final = (*_ENVELOPES, "messages", "conversations")
"""Fields that tables often store as JSON text."""
_TURN_LISTS: Final = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_QUESTIONS: Final = ("prompt", "question", "query", "problem", "input")
_ANSWERS: Final = ("response", "completion", "answer", "output", "solution", "chosen")
_SYSTEMS: Final = ("system", "system_prompt", "system_message")
_SHAPES: Final = "messages, conversations, turns, instruction, prompt, question, text"
_SCHEMA_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array"}
_TEXT_PROMPT_CHARACTERS: Final = 240
_EXPECTED: Final = "messages, conversations, data, instruction, prompt or question with an answer, text"


@dataclass(frozen=True)
class Content:
    """The content of a row: a document (`text`) or a conversation (`messages`), exactly one of the two."""

    shape: Shape
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: str = ""


def read_content(row: Any, fields: Mapping[FieldName, str] | None = None) -> Content:
    """Read the content of a row; raises BadRow for an unknown shape or a field that is not text.

    fields: standard field -> the row's own name for it.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be an object with fields, this is {type_name(row)}")
    row = unwrap_row(_renamed(row, fields) if fields else row)
    content = _recognised(row)
    if not content.messages:
        return content
    system = first_of(row, *_SYSTEMS)
    messages = content.messages
    if messages[0]["role"] == "system" and not messages[0]["content"].strip() and len(messages) > 1:
        messages = messages[1:]  # a form with nothing filled in
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": valid_text(system, "system")}, *messages)
    return Content(content.shape, "", messages, _tools(row))


def unwrap_row(row: Row, depth: int = 3) -> Row:
    """The row without the envelope of a logged request, and with JSON text in known fields parsed.

    depth: the most nested envelopes to remove.
    """
    unwrapped = dict(row)
    for field in _AS_TEXT:
        value = unwrapped.get(field)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            unwrapped[field] = parse_json(value, field)
    for field in _ENVELOPES:
        inside = unwrapped.get(field)
        if depth and isinstance(inside, Mapping) and "messages" not in unwrapped and "prompt" not in unwrapped:
            return unwrap_row(inside, depth - 1)
    return unwrapped


def _recognised(row: Row) -> Content:
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
        text = valid_text(row["prompt"], "prompt") + valid_text(row["canonical_solution"], "canonical_solution")
        return _document(text)
    if (question := first_of(row, *_QUESTIONS)) is not None:
        shape: Shape = "preference" if row.get("chosen") is not None else "prompt-response"
        return Content(shape, "", _exchange(question, first_of(row, *_ANSWERS), first_of(row, *REASONING)))
    if (text := first_of(row, "text", "content")) is not None:
        return _document(valid_text(text, "text"))
    raise BadRow(f"no field that says something (has: {field_names(row)}; expected {_EXPECTED})", "unknown_shape")


def _document(text: str) -> Content:
    if not text.strip():
        raise BadRow("text is empty", "empty_text")
    return Content("text", text)


def _turns(turns: Any, field: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of turns, this is {type_name(turns)}")
    names = ("from", "value") if isinstance(turns[0], Mapping) and "from" in turns[0] else ("role", "content")
    return tuple(read_turn(turn, f"{field}[{number}]", *names) for number, turn in enumerate(turns))


def _alternating(turns: Any, field: str) -> tuple[Message, ...]:
    """UltraChat: texts that alternate between user and assistant; a list of objects is read as a list of turns."""
    if isinstance(turns, list) and turns and isinstance(turns[0], Mapping):
        return _turns(turns, field)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of texts, this is {type_name(turns)}")
    texts = (valid_text(text, f"{field}[{number}]") for number, text in enumerate(turns))
    return tuple({"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts))


def _alpaca(row: Row) -> tuple[Message, ...]:
    before: list[Message] = []
    history = row.get("history")
    if history:
        if not isinstance(history, list):
            raise BadRow(f"history must be a list of [question, answer], this is {type_name(history)}")
        for number, pair in enumerate(history):
            if not isinstance(pair, list) or len(pair) != 2:
                raise BadRow(f"history[{number}] must be [question, answer], this is {type_name(pair)}")
            before += _alternating(pair, f"history[{number}]")
    question, extra = valid_text(row["instruction"], "instruction"), row.get("input")
    if extra:
        question = f"{question}\n\n{valid_text(extra, 'input')}" if question.strip() else valid_text(extra, "input")
    return (*before, *_exchange(question, first_of(row, "output", "response", "answer", "completion")))


def _preferred(row: Row) -> tuple[Message, ...]:
    """The chosen conversation, preceded by the prompt where it holds the answer alone."""
    answer_turns, prompt = _turns(row["chosen"], "chosen"), row.get("prompt")
    if any(message["role"] == "user" for message in answer_turns) or prompt is None:
        return answer_turns
    question_turns = _turns(prompt, "prompt") if isinstance(prompt, list) else _exchange(prompt, None)
    return (*question_turns, *answer_turns)


def _exchange(question: Any, answer: Any, reasoning: Any = None) -> tuple[Message, ...]:
    """A question and, if there is one, its answer; either may be a list of turns."""
    if isinstance(question, list):
        question_turns = _turns(question, "prompt")
    else:
        question_turns = ({"role": "user", "content": valid_text(question, "prompt")},)
    if answer is None:
        return question_turns
    if isinstance(answer, list):
        return (*question_turns, *_turns(answer, "response"))
    message = {"role": "assistant", "content": valid_text(answer, "response")}
    thought = {"reasoning_content": valid_text(reasoning, "reasoning")} if reasoning else {}
    return (*question_turns, {**message, **thought})


def _tools(row: Row) -> str:
    """The offered tools as JSON; OpenAI's older `functions` are converted to `tools`."""
    tools = row.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return ""
        tools = parse_json(tools, "tools")
    if not tools and isinstance(row.get("functions"), Sequence) and not isinstance(row["functions"], str):
        tools = [{"type": "function", "function": function} for function in row["functions"]]
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow(f"tools must be a list of objects, this is {type_name(tools)}")
    return json_text(tools, "tools")


def _renamed(row: Row, fields: Mapping[FieldName, str]) -> Row:
    """The row under standard field names; fields that `fields` does not name are left out."""
    renamed: JsonObject = {}
    for standard, row_field in fields.items():
        if row_field not in row:
            raise BadRow(f"no field {row_field!r:.40} (has: {field_names(row)})", "unknown_shape")
        renamed[standard] = row[row_field]
    return renamed


@dataclass(frozen=True)
class Question:
    """The question of a row: plain text to continue or a chat to answer, exactly one of the two, and its reference."""

    text: str | None
    messages: tuple[dict[str, str], ...] | None
    reference: str


def read_shape(row: Any) -> Question:
    """The question of a row in any of the known formats; raises BadRow for another format or unusable text."""
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be an object with fields, this is {type_name(row)}")
    if row.get("messages") is not None:
        return _read_chat(row["messages"], "messages", "role", "content")
    if row.get("conversations") is not None:
        return _read_chat(row["conversations"], "conversations", "from", "value")
    if row.get("turns") is not None:
        return _read_turns(row)
    if row.get("instruction") is not None:
        instruction, extra = _require_text(row["instruction"], "instruction"), row.get("input")
        if extra:
            instruction = f"{instruction}\n\n{_require_text(extra, 'input')}"
        return _single_question(instruction, _read_reference(row, "output", "response"))
    if row.get("prompt") is not None:
        return _read_prompt(row)
    if row.get("question") is not None:
        return _single_question(_require_text(row["question"], "question"), _read_reference(row, "answer", "response"))
    if row.get("text") is not None:
        return _split_document(_require_text(row["text"], "text"))
    fields = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise BadRow(f"no field that asks something (has: {fields}; expected one of {_SHAPES})")


def _read_turns(row: Row) -> Question:
    """The first question of a list; its reference is a text or the first of a list."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"turns must be a list of texts, this is {type_name(turns)}")
    reference = row.get("reference")
    if isinstance(reference, list):
        reference = reference[0] if reference else None
    return _single_question(_require_text(turns[0], "turns[0]"), reference if isinstance(reference, str) else "")


def _read_prompt(row: Row) -> Question:
    prompt = row["prompt"]
    if isinstance(prompt, list):
        return _read_chat(prompt, "prompt", "role", "content")
    text = _require_text(prompt, "prompt")
    if row.get("canonical_solution") is not None:
        # cut before the line break, as functions of the standard library are: "newline and indentation" is one token
        head = text.rstrip()
        return Question(head, None, text[len(head) :] + _read_reference(row, "canonical_solution"))
    answer = _read_reference(row, "response", "completion", "chosen")
    return _single_question(text, answer) if answer else Question(text, None, _read_reference(row, "reference"))


def _read_chat(turns: Any, field: str, role_field: str, text_field: str) -> Question:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of turns, this is {type_name(turns)}")
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        location = f"{field}[{number}]"
        if not isinstance(turn, Mapping):
            raise BadRow(f"{location} must be an object with {role_field} and {text_field}, this is {type_name(turn)}")
        role = role_of(turn, location, role_field)
        if role in ("tool", "call"):
            raise BadRow(f"{location}: a turn of a tool before the first answer; only what a user asks can be a prompt")
        content = first_of(turn, text_field, "content", "value")
        has_question = any(message["role"] == "user" for message in messages)
        if role == "assistant":
            if not has_question:
                continue  # a greeting before anything was asked
            # another model's answer is only a reference: it may be empty, but must be text
            reference = "" if content == "" else _require_text(join_parts(content), f"{location}.{text_field}")
            return Question(None, tuple(messages), reference)
        if has_question:
            break
        messages.append({"role": role, "content": _require_text(join_parts(content), f"{location}.{text_field}")})
    if not any(message["role"] == "user" for message in messages):
        raise BadRow(f"{field}: no turn by the user")
    return Question(None, tuple(messages), "")


def _single_question(text: str, reference: str) -> Question:
    return Question(None, ({"role": "user", "content": text},), reference)


def _split_document(text: str) -> Question:
    """The beginning of a document (at most half of it) is the prompt, the rest is the reference."""
    cut = min(len(text) // 2, _TEXT_PROMPT_CHARACTERS)
    # cut at white space close by, if there is any: Chinese has none, or one after three characters
    space = max(text.rfind(" ", cut // 2, cut), text.rfind("\n", cut // 2, cut))
    cut = space if space > 0 else cut
    if not text[:cut].strip():
        raise BadRow("text is too short to be cut into a prompt and its continuation")
    return Question(text[:cut], None, text[cut:])


def _read_reference(row: Row, *fields: str) -> str:
    """The first of `fields` that is present, "" without one; raises BadRow for a value that is not a text."""
    for field in fields:
        if row.get(field) is not None:
            value = row[field]
            return _require_text(value, field) if value != "" else ""
    return ""


def read_functions(row: Row, field: str) -> tuple[JsonObject, ...]:
    """The functions in a field as tools in OpenAI's form; raises BadRow where it holds none.

    Python's names of types, as the Berkeley leaderboard writes them, become those of JSON Schema.
    """
    functions = row.get(field)
    if not isinstance(functions, list) or not functions or not all(isinstance(item, Mapping) for item in functions):
        raise BadRow(f"{field} must be a list of functions, this is {type_name(functions)}")
    json_text(functions, field)  # refuses what is nested too deeply for the conversion
    return tuple({"type": "function", "function": _schema(function)} for function in functions)


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    schema = {name: _schema(item) for name, item in value.items() if (name, item) != ("type", "any")}
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = _SCHEMA_TYPES.get(kind, kind)
    return schema


def read_label(row: Row, field: str) -> str:
    """The text in a field of a row; raises BadRow where it is not a text or empty."""
    return _require_text(row.get(field), field)


def _require_text(value: Any, location: str) -> str:
    if not valid_text(value, location).strip():
        raise BadRow(f"{location} is empty")
    return str(value)
