"""A source's chat as the rows that a model could have lived through: which turns are answered, with which thinking.

Reasoning models forget: their templates write the thinking of the last answer only, so what the model saw while it
gave an earlier answer is not a part of the whole chat's text. Where that is so, every answer becomes a row of its own,
with the text as it stood when it was given; where each answer's text goes on from the last one's, the chat stays one
row with every answer masked in.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.data.chat_masks_methods import Rendering
from components.data.control_marks import INLINE_THINKING
from components.data.prompts import accepted_turns, same_day_template

Thinking = Literal["keep", "drop", "last"]
Turns = Literal["all", "last"]
ThinkingStyle = Literal["field", "inline", "none"]

_PROBE = "Qz0think0zQ"


@dataclass(frozen=True)
class ChatRow:
    """One row to be: the turns up to its last answer, which of them are answers to learn from, and how to render it."""

    rendering: Rendering
    messages: tuple[dict[str, Any], ...]
    answers: tuple[int, ...]
    suffix: str = ""  # of the row's id, where a chat becomes several rows

    @functools.cached_property
    def text(self) -> str:
        """The chat as the template writes it."""
        return self.rendering.text(self.messages)

    def without_last_answer(self) -> ChatRow | None:
        """The row up to the answer before the last; None where it has only one."""
        if len(self.answers) < 2:
            return None
        return ChatRow(self.rendering, self.messages[: self.answers[-2] + 1], self.answers[:-1], self.suffix)


def rows_of_chat(
    tokenizer: Any,
    conversation: Sequence[Mapping[str, Any]],
    tools: tuple[dict[str, Any], ...] | None,
    *,
    thinking: Thinking,
    turns: Turns,
    style: ThinkingStyle,
) -> list[ChatRow]:
    """The rows of one chat; none where nobody answers in it. Raises UserError where the template refuses it."""
    plain = accepted_turns(tokenizer, [_parted(message) for message in conversation], tools)
    answered = [turn for turn, message in enumerate(plain) if turn and _answers(message)]
    if turns == "last":
        answered = answered[-1:]
    rows = [
        _row(tokenizer, plain[: turn + 1], tools, thinking, style, suffix=f"-{number}")
        for number, turn in enumerate(answered)
    ]
    if len(rows) > 1 and all(_goes_on(before, after) for before, after in itertools.pairwise(rows)):
        rows = [ChatRow(rows[-1].rendering, rows[-1].messages, tuple(answered))]
    elif len(rows) == 1:
        rows = [ChatRow(rows[0].rendering, rows[0].messages, rows[0].answers)]
    return rows


def thinking_style(tokenizer: Any) -> ThinkingStyle:
    """How this template takes the thinking of the last answer: in a field of its own, inside the content, or not."""
    ask = {"role": "user", "content": "Why?"}
    rendering = Rendering(tokenizer, None, _options(tokenizer, None, True))
    field = {"role": "assistant", "content": "So.", "reasoning_content": _PROBE}
    if _PROBE in rendering.text([ask, field]):
        return "field"
    inline = {"role": "assistant", "content": f"<think>\n{_PROBE}\n</think>\n\nSo."}
    return "inline" if _PROBE in rendering.text([ask, inline]) else "none"


def shown_thinking(row: ChatRow, style: ThinkingStyle) -> bool:
    """Whether the last answer's thinking, if it has any left, can be written by this template."""
    last = row.messages[-1]
    return style != "none" or not last.get("reasoning_content")


def _answers(message: Mapping[str, Any]) -> bool:
    said = message.get("content")
    return message["role"] == "assistant" and bool(
        (isinstance(said, str) and said.strip()) or message.get("tool_calls")
    )


def _parted(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the thinking of its content in a field of its own, and without fields that hold nothing."""
    parted = {name: value for name, value in message.items() if value is not None}
    parted.setdefault("content", "")
    content = parted["content"]
    if parted["role"] == "assistant" and isinstance(content, str) and (found := INLINE_THINKING.match(content)):
        parted["content"] = content[found.end() :]
        if not parted.get("reasoning_content") and found[1].strip():
            parted["reasoning_content"] = found[1].strip("\n")
    return parted


def _row(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: tuple[dict[str, Any], ...] | None,
    thinking: Thinking,
    style: ThinkingStyle,
    *,
    suffix: str,
) -> ChatRow:
    """The row of the last of these messages."""
    last = len(messages) - 1
    thinks = thinking != "drop" and bool(messages[last].get("reasoning_content"))
    told = []
    for turn, message in enumerate(messages):
        reasoning = message.get("reasoning_content")
        copy = {name: value for name, value in message.items() if name != "reasoning_content"}
        if reasoning and (thinking == "keep" or (thinking == "last" and turn == last)):
            if style == "inline":
                copy["content"] = f"<think>\n{reasoning}\n</think>\n\n{copy['content']}"
            else:
                copy["reasoning_content"] = reasoning
        told.append(copy)
    return ChatRow(Rendering(tokenizer, tools, _options(tokenizer, tools, thinks)), tuple(told), (last,), suffix)


def _options(tokenizer: Any, tools: tuple[dict[str, Any], ...] | None, thinks: bool) -> dict[str, Any]:
    """What the template is told of thinking, under the names that it asks for (Qwen3's, DeepSeek-V3.1's)."""
    template = same_day_template(tokenizer, tools)
    names = {"enable_thinking": r"\benable_thinking\b", "thinking": r"\bthinking is (?:not )?defined\b"}
    names["thinking"] += r"|\bnot thinking\b"
    return {name: thinks for name, pattern in names.items() if re.search(pattern, template)}


def _goes_on(before: ChatRow, after: ChatRow) -> bool:
    """Whether the later row's text begins with all of the earlier one's, rendered alike."""
    return before.rendering.options == after.rendering.options and after.text.startswith(before.text.rstrip())
