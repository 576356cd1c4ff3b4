"""The shapes in which people keep prompts and chats, recognised row by row, wrong ones refused with the reason.

Recognised by their fields, in this order: messages (OpenAI), conversations (ShareGPT), turns (MT-Bench, Spec-Bench),
instruction (Alpaca), prompt with canonical_solution (HumanEval), prompt with response, question (GSM8K), prompt, text.
Of a chat only the first exchange is kept: later turns answer what another model said. Whole conversations are read by
chat_shapes.py; what a role and a text are is the same for both (chat_turns.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from components.data.chat_turns import BadRow as BadRow
from components.data.chat_turns import checked, first_of, joined_parts, kind_of, role_of

_SHAPES: Final = "messages, conversations, turns, instruction, prompt, question, text"
_TEXT_PROMPT_CHARACTERS: Final = 240


@dataclass(frozen=True)
class Ask:
    """What a row asks: plain text to continue, or a chat to answer; exactly one of the two is set."""

    text: str | None
    messages: tuple[dict[str, str], ...] | None
    reference: str

    @property
    def characters(self) -> int:
        """Length of the question."""
        return len(self.text or "") + sum(len(message["content"]) for message in self.messages or ())


def read_shape(row: Any) -> Ask:
    """Recognise a row; raises BadRow for anything that is not one of the known shapes with usable text in it."""
    if not isinstance(row, Mapping):
        raise BadRow(f"a row must be an object with fields, this is {kind_of(row)}")
    if row.get("messages") is not None:
        return _chat(row["messages"], "messages", "role", "content")
    if row.get("conversations") is not None:
        return _chat(row["conversations"], "conversations", "from", "value")
    if row.get("turns") is not None:
        return _turns(row)
    if row.get("instruction") is not None:
        instruction, extra = _text(row["instruction"], "instruction"), row.get("input")
        if extra:
            instruction = f"{instruction}\n\n{_text(extra, 'input')}"
        return _question(instruction, _reference(row, "output", "response"))
    if row.get("prompt") is not None:
        return _prompt(row)
    if row.get("question") is not None:
        return _question(_text(row["question"], "question"), _reference(row, "answer", "response"))
    if row.get("text") is not None:
        return _split_text(_text(row["text"], "text"))
    fields = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise BadRow(f"no field that asks something (has: {fields}; expected one of {_SHAPES})")


def _turns(row: Mapping[str, Any]) -> Ask:
    """The first of a list of questions; its reference is the first of a list too, or a text."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"turns must be a list of texts, this is {kind_of(turns)}")
    reference = row.get("reference")
    if isinstance(reference, list):
        reference = reference[0] if reference else None
    return _question(_text(turns[0], "turns[0]"), reference if isinstance(reference, str) else "")


def _prompt(row: Mapping[str, Any]) -> Ask:
    prompt = row["prompt"]
    if isinstance(prompt, list):
        return _chat(prompt, "prompt", "role", "content")
    text = _text(prompt, "prompt")
    if row.get("canonical_solution") is not None:
        # cut before the line break, as functions of the standard library are: "newline and indentation" is one token
        head = text.rstrip()
        return Ask(head, None, text[len(head) :] + _reference(row, "canonical_solution"))
    answer = _reference(row, "response", "completion", "chosen")
    return _question(text, answer) if answer else Ask(text, None, _reference(row, "reference"))


def _chat(turns: Any, field: str, role_field: str, text_field: str) -> Ask:
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of turns, this is {kind_of(turns)}")
    asked: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        where = f"{field}[{number}]"
        if not isinstance(turn, Mapping):
            raise BadRow(f"{where} must be an object with {role_field} and {text_field}, this is {kind_of(turn)}")
        known = role_of(turn, where, role_field)
        if known in ("tool", "call"):
            raise BadRow(f"{where}: a turn of a tool before the first answer; only what a user asks can be a prompt")
        content = first_of(turn, text_field, "content", "value")
        asking = any(message["role"] == "user" for message in asked)
        if known == "assistant":
            if not asking:
                continue  # a greeting before anything was asked
            # what another model answered is only a reference: it may be empty, but not something else than text
            reference = "" if content == "" else _text(joined_parts(content), f"{where}.{text_field}")
            return Ask(None, tuple(asked), reference)
        if asking:
            break
        asked.append({"role": known, "content": _text(joined_parts(content), f"{where}.{text_field}")})
    if not any(message["role"] == "user" for message in asked):
        raise BadRow(f"{field}: no turn by the user")
    return Ask(None, tuple(asked), "")


def _question(text: str, reference: str) -> Ask:
    return Ask(None, ({"role": "user", "content": text},), reference)


def _split_text(text: str) -> Ask:
    """The beginning of a document (at most half of it) is the prompt, what follows the reference."""
    cut = min(len(text) // 2, _TEXT_PROMPT_CHARACTERS)
    # at white space if there is some near: Chinese has none, and its only blank may stand after three characters
    space = max(text.rfind(" ", cut // 2, cut), text.rfind("\n", cut // 2, cut))
    cut = space if space > 0 else cut
    if not text[:cut].strip():
        raise BadRow("text is too short to be cut into a prompt and its continuation")
    return Ask(text[:cut], None, text[cut:])


def _reference(row: Mapping[str, Any], *fields: str) -> str:
    """The first of `fields` that is there; absent is "", present but not a text is refused."""
    for field in fields:
        if row.get(field) is not None:
            value = row[field]
            return _text(value, field) if value != "" else ""
    return ""


def read_label(row: Mapping[str, Any], field: str) -> str:
    """The field of a row that labels it; raises BadRow where it is not a text."""
    return _text(row.get(field), field)


def _text(value: Any, where: str) -> str:
    if not checked(value, where).strip():
        raise BadRow(f"{where} is empty")
    return str(value)
