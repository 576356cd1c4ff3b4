"""Rules that drop conversations not worth training on: every rule has a setting, every dropped row a named reason.

Rules run from cheap to expensive, and the first that matches gives the reason. No rule depends on the target: it checks
the row, not a model's likelihood of it. Encodings are checked by `ftfy` (mojibake of single-byte encodings) and, for
Chinese read as the wrong one of UTF-8 and GBK, by whether the text decodes cleanly the other way round.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from components.data import cleaning_patterns as patterns
from components.data.cleaning_encoding import has_control_characters, is_mojibake
from components.data.cleaning_repetition import repeated_share

if TYPE_CHECKING:
    from components.data.chats import Chat

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]

REASONS: Final = {
    "malformed_turn": "a turn without a known role, or whose content is no text",
    "empty_turn": "a turn without words (a call of a tool needs none)",
    "wrong_role_order": "not: system if any, then user and assistant in turn, tools after an assistant",
    "too_short": "fewer characters than min_question_characters, min_answer_characters or min_text_characters",
    "too_long": "more characters than max_characters",
    "too_many_turns": "more turns than max_turns",
    "replacement_characters": "U+FFFD stands where an earlier reader could not decode a byte",
    "mojibake": "decoded with the wrong encoding",
    "control_characters": "control characters other than tab and line breaks",
    "template_marks": "marks of a chat template stand inside a turn",
    "html": "an answer is mostly tags though nobody asked about markup",
    "url_only": "a question or an answer is nothing but addresses",
    "refusal": "an answer begins by refusing",
    "boilerplate": "an answer speaks of itself as a model, or holds leftovers of a web page",
    "repeated_text": "the text repeats itself",
    "repeated_turn": "the assistant says the same thing twice",
}
"""Every reason that `drop_reason` returns, in the order of the rules."""


class Cleaning(BaseModel):
    """Settings of the rules that drop a row: false switches a rule off, a larger number widens a limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role_order: bool = Field(
        default=True, description="Drop chats whose roles do not take turns, or that begin with an answer."
    )
    min_question_characters: Count = Field(
        default=2, description="Drop chats whose first question is shorter. Characters."
    )
    min_answer_characters: Count = Field(default=1, description="Drop chats with a shorter answer. Characters.")
    min_text_characters: Count = Field(default=32, description="Drop shorter plain texts. Characters.")
    max_characters: Annotated[int, Field(ge=1)] = Field(
        default=65_536, description="Drop longer rows. Characters in all."
    )
    max_turns: Annotated[int, Field(ge=1)] = Field(default=128, description="Drop chats with more messages.")
    replacement_characters: bool = Field(
        default=True, description="Drop rows that hold U+FFFD: what stood there is lost."
    )
    control_characters: bool = Field(default=True, description="Drop rows with control characters.")
    mojibake: bool = Field(default=True, description="Drop rows that were decoded with the wrong encoding.")
    repair: bool = Field(
        default=False,
        description="Mend mojibake and control characters first and count it; only what stays wrong is dropped.",
    )
    template_marks: bool = Field(
        default=True, description="Drop rows that hold special tokens of chat templates as text."
    )
    max_html_share: Share = Field(
        default=0.2, description="Drop answers with a larger share of characters in tags (code set apart); 1 keeps all."
    )
    url_only: bool = Field(default=True, description="Drop questions or answers that are nothing but addresses.")
    refusals: bool = Field(default=True, description="Drop chats with an answer that refuses (English and Chinese).")
    boilerplate: bool = Field(
        default=True, description="Drop answers that speak of themselves as a model, and page leftovers."
    )
    also_refusals: tuple[str, ...] = Field(
        default=(), description="Further regular expressions for beginnings of refusals."
    )
    also_boilerplate: tuple[str, ...] = Field(default=(), description="Further regular expressions for boilerplate.")
    max_repeated_share: Share = Field(
        default=0.5,
        description="Drop a turn or text of which a larger share stood in it before, by 16 characters or by lines; "
        "1 keeps all.",
    )
    repeated_turns: bool = Field(
        default=True, description="Drop chats in which the assistant says the same thing twice."
    )


def drop_reason(chat: Chat, cleaning: Cleaning) -> str | None:
    """The reason (one of REASONS) why a row is dropped, or None where it is kept.

    Malformed and empty turns are always dropped, since no later step could read them; all other rules are settings.
    With `repair` the caller first repairs the row with cleaning_encoding.repair.
    """
    for rule in _TEXT_RULES if not chat.messages else _CHAT_RULES:
        reason = rule(chat, cleaning)
        if reason is not None:
            return reason
    return None


def _malformed(chat: Chat, cleaning: Cleaning) -> str | None:
    empty = False
    for message in chat.messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return "malformed_turn"
        content = message.get("content")
        calls = bool(message.get("tool_calls"))
        if not isinstance(content, str) and not (content is None and calls):
            return "malformed_turn"
        if not calls and message["role"] != "tool" and not (content or "").strip(_BLANK):
            empty = True
    return "empty_turn" if empty else None


def _role_order(chat: Chat, cleaning: Cleaning) -> str | None:
    if not cleaning.role_order:
        return None
    before = "start"
    for number, message in enumerate(chat.messages):
        role = message["role"]
        if role == "system" and number == 0:
            continue
        if before not in _MAY_FOLLOW.get(role, ()):
            return "wrong_role_order"
        if role == "tool" and before == "assistant" and not chat.messages[number - 1].get("tool_calls"):
            return "wrong_role_order"
        before = role
    return "wrong_role_order" if before == "start" else None


def _length(chat: Chat, cleaning: Cleaning) -> str | None:
    if len(chat.messages) > cleaning.max_turns:
        return "too_many_turns"
    if sum(len(text) for text in _texts(chat)) > cleaning.max_characters:
        return "too_long"
    if not chat.messages:
        return "too_short" if len(chat.text.strip(_BLANK)) < cleaning.min_text_characters else None
    questions = list(_texts(chat, "user"))[:1]  # later ones may well be "B" or "2"
    answers = [m["content"] for m in chat.messages if m["role"] == "assistant" and not m.get("tool_calls")]
    if any(len(text.strip(_BLANK)) < cleaning.min_question_characters for text in questions):
        return "too_short"
    return "too_short" if any(len(text.strip(_BLANK)) < cleaning.min_answer_characters for text in answers) else None


def _encoding(chat: Chat, cleaning: Cleaning) -> str | None:
    texts = [text for text in _texts(chat) if text]
    if cleaning.replacement_characters and any("\ufffd" in text for text in texts):
        return "replacement_characters"
    if cleaning.mojibake and any(is_mojibake(text) for text in texts):
        return "mojibake"
    if cleaning.control_characters and any(has_control_characters(text) for text in texts):
        return "control_characters"
    return None


def _leftovers(chat: Chat, cleaning: Cleaning) -> str | None:
    if cleaning.template_marks and any(_has_marks(text) for text in _texts(chat)):
        return "template_marks"
    if cleaning.max_html_share < 1 and _mostly_tags(chat, cleaning.max_html_share):
        return "html"
    if cleaning.url_only and any(_only_addresses(text) for text in _texts(chat, "user", "assistant")):
        return "url_only"
    return None


def _refusal(chat: Chat, cleaning: Cleaning) -> str | None:
    heads = [_head(text) for text in _texts(chat, "assistant")]
    if cleaning.refusals and any(_refusals(cleaning.also_refusals).match(head) for head in heads):
        return "refusal"
    if cleaning.boilerplate:
        if any(_boilerplate(cleaning.also_boilerplate).search(head) for head in heads):
            return "boilerplate"
        if any(_page().search(text) for text in _texts(chat, "assistant")):
            return "boilerplate"
    return None


def _web_boilerplate(chat: Chat, cleaning: Cleaning) -> str | None:
    matched = cleaning.boilerplate and _web(cleaning.also_boilerplate).search(chat.text)
    return "boilerplate" if matched else None


def _repetition(chat: Chat, cleaning: Cleaning) -> str | None:
    if cleaning.max_repeated_share < 1:
        for text in _texts(chat):
            if repeated_share(text, cleaning.max_repeated_share) > cleaning.max_repeated_share:
                return "repeated_text"
    if cleaning.repeated_turns:
        answers = [text.strip() for text in _texts(chat, "assistant") if len(text.strip()) >= _SAME_TURN_CHARACTERS]
        if len(set(answers)) < len(answers):
            return "repeated_turn"
    return None


Rule = Callable[["Chat", Cleaning], "str | None"]
_CHAT_RULES: Final[tuple[Rule, ...]] = (
    _malformed,
    _role_order,
    _length,
    _encoding,
    _leftovers,
    _refusal,
    _repetition,
)
_TEXT_RULES: Final[tuple[Rule, ...]] = (_length, _encoding, _leftovers, _web_boilerplate, _repetition)
_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
_MAY_FOLLOW: Final = {
    "user": ("start", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_BLANK: Final = " \t\r\n\u00a0\u3000\u200b\u200c\u200d\ufeff"
_SAME_TURN_CHARACTERS: Final = 40
_ADDRESS: Final = re.compile(r"(?:https?://|www\.)[^\s，。；）】]+")
_TAG: Final = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*(?:\s[^<>]{0,400})?/?>|&(?:nbsp|amp|lt|gt|quot|#\d{2,5});")
_CODE: Final = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def _texts(chat: Chat, *roles: str) -> Iterator[str]:
    """The contents of turns with these roles, or the plain text; without roles all contents and their reasoning."""
    if not chat.messages:
        yield chat.text
        return
    for message in chat.messages:
        if not roles or message["role"] in roles:
            yield message["content"] or ""
        if not roles and message.get("reasoning_content"):
            yield str(message["reasoning_content"])


def _head(text: str) -> str:
    return text[: patterns.HEAD_CHARACTERS].lstrip(_BLANK).replace("\u2019", "'")


def _has_marks(text: str) -> bool:
    return ("<" in text or "[" in text or "###" in text) and _marks().search(text) is not None


def _mostly_tags(chat: Chat, share: float) -> bool:
    questions = ""
    for message in chat.messages or ({"role": "assistant", "content": chat.text},):
        text: str = message["content"] or ""
        if message["role"] in ("user", "system"):
            questions = f"{questions}\n{text}"
        elif message["role"] == "assistant" and ("<" in text or "&" in text):
            prose = _CODE.sub(" ", text)
            in_tags = sum(len(tag) for tag in _TAG.findall(prose))
            if in_tags > share * max(1, len(prose.strip())) and not _about_markup().search(questions):
                return True
    return False


def _only_addresses(text: str) -> bool:
    if "http" not in text and "www." not in text:
        return False
    return not any(character.isalnum() for character in _ADDRESS.sub(" ", text))


def _compiled(expressions: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{expression})" for expression in expressions), re.IGNORECASE)


@functools.lru_cache(maxsize=8)
def _refusals(further: tuple[str, ...]) -> re.Pattern[str]:
    return _compiled((*patterns.REFUSALS, *further))


@functools.lru_cache(maxsize=8)
def _boilerplate(further: tuple[str, ...]) -> re.Pattern[str]:
    return _compiled((*patterns.BOILERPLATE, *further))


@functools.lru_cache(maxsize=8)
def _web(further: tuple[str, ...]) -> re.Pattern[str]:
    return _compiled((*patterns.WEB_BOILERPLATE, *further))


@functools.cache
def _page() -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:{'|'.join(patterns.PAGE_LEFTOVERS)})[ \t]*$", re.IGNORECASE | re.MULTILINE)


@functools.cache
def _marks() -> re.Pattern[str]:
    return re.compile("|".join(patterns.TEMPLATE_MARKS))


@functools.cache
def _about_markup() -> re.Pattern[str]:
    return re.compile(patterns.ABOUT_MARKUP, re.IGNORECASE)


def pattern_faults(cleaning: dict[str, Any]) -> list[str]:
    """Faults of the regular expressions in a `clean:` setting, a line each; for `<step>_settings`."""
    faults = []
    for name in ("also_refusals", "also_boilerplate"):
        for expression in cleaning.get(name, ()):
            try:
                re.compile(f"x|(?:{expression})")  # as _compiled puts it among the others: (?s) must come first
            except re.error as error:
                faults.append(f"{name}: {expression!r} is not a regular expression ({error}); mend or remove it")
    return faults
