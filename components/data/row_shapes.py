"""The common formats of prompt rows, recognised row by row; other rows are refused with the reason.

Its fields decide the format, in this order: messages (OpenAI), conversations (ShareGPT), turns (MT-Bench, Spec-Bench),
instruction (Alpaca), prompt with canonical_solution (HumanEval), prompt with response, question (GSM8K), prompt, text.
Only the first exchange of a chat is used, since later turns answer another model. Whole conversations are read by
chat_shapes.py; both share the rules for roles and texts in chat_turns.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from components.data.chat_turns import BadRow as BadRow
from components.data.chat_turns import first_of, join_parts, role_of, type_name, valid_text

_SHAPES: Final = "messages, conversations, turns, instruction, prompt, question, text"
_TEXT_PROMPT_CHARACTERS: Final = 240


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


def _read_turns(row: Mapping[str, Any]) -> Question:
    """The first question of a list; its reference is a text or the first of a list."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"turns must be a list of texts, this is {type_name(turns)}")
    reference = row.get("reference")
    if isinstance(reference, list):
        reference = reference[0] if reference else None
    return _single_question(_require_text(turns[0], "turns[0]"), reference if isinstance(reference, str) else "")


def _read_prompt(row: Mapping[str, Any]) -> Question:
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


def _read_reference(row: Mapping[str, Any], *fields: str) -> str:
    """The first of `fields` that is present, "" without one; raises BadRow for a value that is not a text."""
    for field in fields:
        if row.get(field) is not None:
            value = row[field]
            return _require_text(value, field) if value != "" else ""
    return ""


def read_label(row: Mapping[str, Any], field: str) -> str:
    """The text in a field of a row; raises BadRow where it is not a text or empty."""
    return _require_text(row.get(field), field)


def _require_text(value: Any, location: str) -> str:
    if not valid_text(value, location).strip():
        raise BadRow(f"{location} is empty")
    return str(value)
