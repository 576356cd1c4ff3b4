"""Detects control marks, the tokens and words with which a chat template separates turns, in text from outside.

A tokenizer turns `<|im_end|>` into one control token wherever it occurs, also in the middle of a user's words. A text
that holds a mark could end its own turn and begin another, so prompts and training rows with one are set aside.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jinja2

from components.data.sources.turns import Message
from components.outside_json import JsonObject

INLINE_THINKING: Final = re.compile(r"\A\s*(?:<think>)?((?:(?!</think>).)*)</think>\s*", re.DOTALL)
"""Thinking at the beginning of an answer's content; the template may write the opening tag (DeepSeek-R1)."""
_LITERAL: Final = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z][A-Z_ ]{2,40}\]")
"""The form of marks in a template's own text: <|user|>, <start_of_turn>, </tool_call>, [INST]."""
_HTML: Final = re.compile(
    r"</?(a|b|blockquote|body|br|caption|code|div|em|h[1-6]|hr|html|i|img|li|ol|p|pre|s|span|strong|sub|sup|table|tbody"
    r"|td|tfoot|th|thead|tr|u|ul)/?>",
    re.IGNORECASE,
)
"""HTML elements, which some tokenizers (Gemma's) have as ordinary added tokens and people write in prompts."""
_NEUTRAL: Final = "Qz"


class HoldsControlMark(Exception):
    """A text holds a control mark; str() says which part of the chat holds it, and the mark."""


def control_marks(tokenizer: Any) -> tuple[str, ...]:
    """The marks of a tokenizer: its special tokens, its other added tokens, and the marks in its chat templates.

    An added token that is not special counts only if it does not look like ordinary text: runs of white space, plain
    words and HTML elements do not count.
    """
    return _Marks.of(tokenizer).words


def refuse_marked_text(tokenizer: Any, text: str) -> None:
    """Raises HoldsControlMark where a plain-text prompt holds a mark."""
    marks = _Marks.of(tokenizer)
    marks.refuse(text, "the text")
    if marks.marks_in(marks.ids_of(text)):
        raise HoldsControlMark("the text becomes a control token of this tokenizer")


def ids_of_unmarked_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[JsonObject] | None,
    render: Callable[[list[Message]], str],
) -> list[int]:
    """The token ids of a rendered chat.

    Raises HoldsControlMark where any text of the chat holds a mark, or where the rendered chat gains one by it.

    Every string is checked: contents, thinking, names, tool calls with their arguments, the tools. The rendering must
    also hold the same control tokens as a rendering of the same turns with neutral contents, since two harmless texts
    may form a mark together. render: messages -> their text as the chat template writes it.
    """
    marks = _Marks.of(tokenizer)
    for turn, message in enumerate(messages):
        for location, text in _texts(_with_thinking_apart(message), f"message {turn + 1}"):
            marks.refuse(text, location)
    for location, text in _texts(list(tools or ()), "tools"):
        marks.refuse(text, location)
    ids = marks.ids_of(render([dict(message) for message in messages]))
    if marks.marks_in(ids) != marks.marks_in(marks.ids_of(render(_neutral_turns(messages)))):
        raise HoldsControlMark("its texts form a control token together with what the chat template writes")
    return ids


class _Marks:
    """The marks of one tokenizer, as words and as token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        written = set(_literals(tokenizer))
        added = tokenizer.added_tokens_decoder
        tokens = {
            number: token.content
            for number, token in added.items()
            if token.special or token.content in written or _looks_like_a_mark(token.content)
        }
        self.ids = frozenset(tokens)
        words = {*tokens.values(), *tokenizer.all_special_tokens, *written}
        self.words = tuple(sorted(word for word in words if word.strip()))
        # the longest first, so that an error names <|im_end|> and not a shorter mark within it
        alternatives = "|".join(re.escape(word) for word in sorted(self.words, key=len, reverse=True))
        self._pattern = re.compile(alternatives or r"(?!)")

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of(tokenizer: Any) -> _Marks:
        """The marks of a tokenizer, computed once."""
        return _Marks(tokenizer)

    def refuse(self, text: str, location: str) -> None:
        if (mark := self._pattern.search(text)) is not None:
            raise HoldsControlMark(f"{location} holds {mark[0]}, a control mark of this tokenizer")

    def ids_of(self, text: str) -> list[int]:
        """The token ids of a text."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def marks_in(self, ids: Sequence[int]) -> list[int]:
        """The control tokens among these, in order."""
        return [token for token in ids if token in self.ids]


def _looks_like_a_mark(token: str) -> bool:
    return bool(token.strip()) and not token.strip().isalnum() and _HTML.fullmatch(token.strip()) is None


def _literals(tokenizer: Any) -> Iterator[str]:
    """The marks in chat templates: in their text outside of tags, and in the strings inside tags."""
    templates = tokenizer.chat_template or ""
    for template in templates.values() if isinstance(templates, Mapping) else (templates,):
        try:
            pieces = [value for _, kind, value in jinja2.Environment().lex(template) if kind in ("data", "string")]
        except jinja2.TemplateSyntaxError:  # rendering says so, in one line
            pieces = []
        for piece in pieces:
            yield from (literal for literal in _LITERAL.findall(piece) if _HTML.fullmatch(literal) is None)


def _texts(value: Any, location: str) -> Iterator[tuple[str, str]]:
    """(location, string) for every string within a JSON value, keys included."""
    if isinstance(value, str):
        yield location, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield location, str(name)
            yield from _texts(inner, f"{name} of {location}")
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner, location)


def _with_thinking_apart(message: Message) -> Message:
    """The message with its leading thinking in a field of its own: the tags around it are the template's."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return dict(message)
    if (thinking := INLINE_THINKING.match(content)) is None:
        return dict(message)
    return {**message, "content": content[thinking.end() :], "thinking": thinking[1]}


def _neutral_turns(messages: Sequence[Message]) -> list[Message]:
    """The same turns with a neutral word for every content that is not blank."""
    turns = []
    for message in messages:
        copy = dict(message)
        for field in ("content", "reasoning_content"):
            text = copy.get(field)
            if isinstance(text, str) and text.strip():
                copy[field] = _NEUTRAL
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            thinking = INLINE_THINKING.match(content)
            if thinking is not None:
                opening = "<think>" if content.lstrip().startswith("<think>") else ""
                answer = _NEUTRAL if content[thinking.end() :].strip() else ""
                copy["content"] = f"{opening}\n{_NEUTRAL}\n</think>\n\n{answer}"
        turns.append(copy)
    return turns
