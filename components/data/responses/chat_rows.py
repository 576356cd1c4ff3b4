"""Turns a source's chat into training rows that show each answer with the text its model saw when it answered.

Templates of reasoning models write the thinking of the last answer only, so the text that the model saw at an earlier
answer is not a prefix of the whole chat's text. In that case every answer becomes a row of its own, rendered up to that
answer; where each answer's text continues the previous one's, the chat stays one row with all answers in its mask.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from components.data.formats.control_marks import INLINE_THINKING
from components.data.formats.prompts import Tool, accepted_turns, render_chat, same_day_template
from components.data.settings import Thinking, Turns
from components.data.sources.turns import Message
from components.outside_json import JsonObject

Messages = Sequence[Message]
Tools = tuple[Tool, ...]
"""The offered tools in OpenAI's form."""
ThinkingStyle = Literal["field", "inline", "none"]
_PROBE = "Qz0think0zQ"


@dataclass(frozen=True)
class Rendering:
    """A tokenizer's chat template with all of its arguments except the messages."""

    tokenizer: Any
    tools: Tools | None
    options: JsonObject

    def text(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        """The chat as text; raises UserError where the template refuses it."""
        return render_chat(
            self.tokenizer, messages, tools=self.tools, generation_prompt=generation_prompt, options=self.options
        )

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a rendered text, and the characters (start, stop) of each."""
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(out["input_ids"]), [(int(start), int(stop)) for start, stop in out["offset_mapping"]]


@dataclass(frozen=True)
class ChatRow:
    """A training row before rendering: turns up to its last answer, indices of answers to learn from, a rendering."""

    rendering: Rendering
    messages: tuple[Message, ...]
    answers: tuple[int, ...]
    suffix: str = ""  # of the row's id, where a chat becomes several rows

    @functools.cached_property
    def text(self) -> str:
        """The chat as the template writes it."""
        return self.rendering.text(self.messages)

    def without_last_answer(self) -> ChatRow | None:
        """The row up to its second last answer; None where it has only one."""
        if len(self.answers) < 2:
            return None
        return ChatRow(self.rendering, self.messages[: self.answers[-2] + 1], self.answers[:-1], self.suffix)


def rows_of_chat(
    tokenizer: Any,
    conversation: Sequence[Message],
    tools: Tools | None,
    *,
    thinking: Thinking,
    turns: Turns,
    style: ThinkingStyle,
) -> list[ChatRow]:
    """The rows of one chat; [] where it has no answer. Raises UserError where the template refuses it."""
    plain = accepted_turns(tokenizer, [_with_thinking_apart(message) for message in conversation], tools)
    answered = [turn for turn, message in enumerate(plain) if turn and _is_answer(message)]
    if turns == "last":
        answered = answered[-1:]
    rows = [
        _row(tokenizer, plain[: turn + 1], tools, thinking, style, suffix=f"-{number}")
        for number, turn in enumerate(answered)
    ]
    if len(rows) > 1 and all(_continues(before, after) for before, after in itertools.pairwise(rows)):
        rows = [ChatRow(rows[-1].rendering, rows[-1].messages, tuple(answered))]
    elif len(rows) == 1:
        rows = [ChatRow(rows[0].rendering, rows[0].messages, rows[0].answers)]
    return rows


def thinking_style(tokenizer: Any) -> ThinkingStyle:
    """Whether the template takes the last answer's thinking in its own field, inside the content, or not at all."""
    ask = {"role": "user", "content": "Why?"}
    rendering = Rendering(tokenizer, None, _options(tokenizer, None, True))
    field = {"role": "assistant", "content": "So.", "reasoning_content": _PROBE}
    if _PROBE in rendering.text([ask, field]):
        return "field"
    inline = {"role": "assistant", "content": f"<think>\n{_PROBE}\n</think>\n\nSo."}
    return "inline" if _PROBE in rendering.text([ask, inline]) else "none"


def can_write_thinking(row: ChatRow, style: ThinkingStyle) -> bool:
    """Whether the template can write the last answer's thinking; true where it has none."""
    last = row.messages[-1]
    return style != "none" or not last.get("reasoning_content")


def _is_answer(message: Message) -> bool:
    content = message.get("content")
    return message["role"] == "assistant" and bool(
        (isinstance(content, str) and content.strip()) or message.get("tool_calls")
    )


def _with_thinking_apart(message: Message) -> Message:
    """The message with the thinking of its content in a field of its own, and without null fields."""
    separated = {name: value for name, value in message.items() if value is not None}
    separated.setdefault("content", "")
    content = separated["content"]
    if separated["role"] == "assistant" and isinstance(content, str) and (thinking := INLINE_THINKING.match(content)):
        separated["content"] = content[thinking.end() :]
        if not separated.get("reasoning_content") and thinking[1].strip():
            separated["reasoning_content"] = thinking[1].strip("\n")
    return separated


def _row(
    tokenizer: Any,
    messages: Messages,
    tools: Tools | None,
    thinking: Thinking,
    style: ThinkingStyle,
    *,
    suffix: str,
) -> ChatRow:
    """The row whose only answer is the last message."""
    last = len(messages) - 1
    thinks = thinking != "drop" and bool(messages[last].get("reasoning_content"))
    copies = []
    for turn, message in enumerate(messages):
        reasoning = message.get("reasoning_content")
        copy = {name: value for name, value in message.items() if name != "reasoning_content"}
        if reasoning and (thinking == "keep" or (thinking == "last" and turn == last)):
            if style == "inline":
                copy["content"] = f"<think>\n{reasoning}\n</think>\n\n{copy['content']}"
            else:
                copy["reasoning_content"] = reasoning
        copies.append(copy)
    return ChatRow(Rendering(tokenizer, tools, _options(tokenizer, tools, thinks)), tuple(copies), (last,), suffix)


def _options(tokenizer: Any, tools: Tools | None, thinks: bool) -> JsonObject:
    """The template's thinking options, under the names that it uses (those of Qwen3 or DeepSeek-V3.1)."""
    template = same_day_template(tokenizer, tools)
    names = {"enable_thinking": r"\benable_thinking\b", "thinking": r"\bthinking is (?:not )?defined\b"}
    names["thinking"] += r"|\bnot thinking\b"
    return {name: thinks for name, pattern in names.items() if re.search(pattern, template)}


def _continues(before: ChatRow, after: ChatRow) -> bool:
    """Whether the later row's text begins with all of the earlier one's, rendered alike."""
    return before.rendering.options == after.rendering.options and after.text.startswith(before.text.rstrip())
