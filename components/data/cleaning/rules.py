"""Rules that drop conversations not worth training on: every rule has a setting, every dropped row a named reason.

Rules run from cheap to expensive, and the first that matches gives the reason. No rule depends on the target: it checks
the row, not a model's likelihood of it. Encodings are checked by encoding.py.

Refusals, boilerplate and page leftovers are regular expressions in English and Chinese. Case is ignored, and curly
apostrophes are straightened first. REFUSALS are matched at the beginning of an answer only, so that a story in which
somebody refuses is kept; BOILERPLATE is searched in an answer's first HEAD_CHARACTERS; PAGE_LEFTOVERS match whole lines
anywhere in an answer; WEB_BOILERPLATE applies to plain text.

Repetition (a loop of a model, a page copied twice) is measured alike in Chinese and English: long lines that occurred
before, and windows of 16 characters that occurred before, which need no notion of a word. Only letters and digits
count, because the frames of tables and drawings repeat anyway. Windows are counted only where `zlib` finds the text far
more compressible than prose, since that check costs a hundredth.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Final

from components.data.cleaning.encoding import has_control_characters, is_mojibake
from components.data.formats.chats import Chat
from components.data.settings import Cleaning

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


def drop_reason(chat: Chat, cleaning: Cleaning) -> str | None:
    """The reason (one of REASONS) why a row is dropped, or None where it is kept.

    Malformed and empty turns are always dropped, since no later step could read them; all other rules are settings.
    With `repair` the caller first repairs the row with encoding.repair.
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
    if cleaning.refusals and any(_any_of(*REFUSALS, *cleaning.also_refusals).match(head) for head in heads):
        return "refusal"
    if cleaning.boilerplate:
        if any(_any_of(*BOILERPLATE, *cleaning.also_boilerplate).search(head) for head in heads):
            return "boilerplate"
        if any(_page().search(text) for text in _texts(chat, "assistant")):
            return "boilerplate"
    return None


def _web_boilerplate(chat: Chat, cleaning: Cleaning) -> str | None:
    matched = cleaning.boilerplate and _any_of(*WEB_BOILERPLATE, *cleaning.also_boilerplate).search(chat.text)
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


Rule = Callable[[Chat, Cleaning], str | None]
_CHAT_RULES: Final[tuple[Rule, ...]] = (_malformed, _role_order, _length, _encoding, _leftovers, _refusal, _repetition)
_TEXT_RULES: Final[tuple[Rule, ...]] = (_length, _encoding, _leftovers, _web_boilerplate, _repetition)
_ROLES: Final = frozenset({"system", "user", "assistant", "tool"})
_MAY_FOLLOW: Final = {"user": ("start", "assistant"), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}
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
    return text[:HEAD_CHARACTERS].lstrip(_BLANK).replace("\u2019", "'")


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
            if in_tags > share * max(1, len(prose.strip())) and not _any_of(ABOUT_MARKUP).search(questions):
                return True
    return False


def _only_addresses(text: str) -> bool:
    if "http" not in text and "www." not in text:
        return False
    return not any(character.isalnum() for character in _ADDRESS.sub(" ", text))


@functools.lru_cache(maxsize=32)
def _any_of(*expressions: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{expression})" for expression in expressions), re.IGNORECASE)


@functools.cache
def _page() -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*(?:{'|'.join(PAGE_LEFTOVERS)})[ \t]*$", re.IGNORECASE | re.MULTILINE)


@functools.cache
def _marks() -> re.Pattern[str]:
    return re.compile("|".join(TEMPLATE_MARKS))


HEAD_CHARACTERS: Final = 300
"""How far into an answer boilerplate is searched; further down it may be a quotation."""

_EN_SELF = r"an? (?:ai|artificial intelligence|(?:large )?language model|virtual assistant|chatbot)\b"
_EN_CANNOT = (
    r"(?:can'?t|cannot|can not|won'?t|will not|must decline|must refuse|(?:am|'m|was) (?:not able|unable)|not able to"
    r"|unable to|not capable of|(?:don't|do not) (?:have (?:the ability|the capability|access)|feel comfortable))"
)
_ZH_SELF = (
    r"(?:一个|一個|一名|一款|一位|一种)?(?:大型|负责任的)?"
    r"(?:(?:人工智能|人工智慧|AI)\s*(?:大?语言)?(?:模型|助手|助理|系统|程序|机器人|(?=[，,]|我))"
    r"|语言模型|語言模型|大模型|智能助手|聊天机器人|虚拟助手)"
)
_ZH_CANNOT = r"(?:无法|無法|不能|没有能力|沒有能力|不具备|不具備|没办法|没有办法|不便|不可以|拒绝)"
_ZH_SORRY = r"(?:非常|很|十分|实在|真的|真)?(?:抱歉|对不起|對不起|遗憾|不好意思)"

REFUSALS: Final = (
    rf"(?:i'm|i am|we're|we are) (?:really |very |so |truly |deeply )?(?:sorry|afraid)[,.]? "
    rf"(?:but |that )*(?:as {_EN_SELF}[^.!?]{{0,60}}, )?(?:but )?i (?:{_EN_CANNOT}|don't|do not)",
    rf"(?:sorry|apologies|my apologies|i apologi[sz]e)[,.]? (?:but )?(?:as {_EN_SELF}[^.!?]{{0,60}}, )?i {_EN_CANNOT}",
    rf"(?:unfortunately,? |sorry, (?:but )?)?as {_EN_SELF}[^.!?]{{0,120}}\b{_EN_CANNOT}",
    r"(?:unfortunately,? )?i(?: can'?t| cannot| can not| won'?t| will not| must decline to|(?: am|'m) (?:not able"
    r"|unable) to) (?:assist|help (?:you )?with|provide|fulfil|comply|generate|create|support|engage|continue|answer"
    r"|discuss|offer|participate|write|share|access|browse|open)",
    r"(?:it is|it's|it would be) (?:not (?:appropriate|ethical|possible for me)|inappropriate|unethical|against my)",
    r"(?:your|this) (?:request|question|prompt) (?:violates|goes against|is inappropriate|is against)",
    rf"{_ZH_SORRY}[，,。.！!\s]*(?:但是?|因为|不过)?(?:作为{_ZH_SELF}[^。！？]{{0,30}}[，,]\s*)?[^，。！？]{{0,8}}{_ZH_CANNOT}",
    rf"(?:作为|作為|身为){_ZH_SELF}[^。！？]{{0,60}}{_ZH_CANNOT}",
    rf"我(?:们)?(?:暂时|目前)?{_ZH_CANNOT}(?:够)?(?:为您|为你|向您|向你|给您|给你)?"
    r"(?:提供|回答|回應|回应|协助|協助|帮助|满足|生成|完成|讨论|执行|参与|访问|打开)",
    r"(?:您|你)的(?:请求|要求|问题|提问)(?:违反|违背|涉及(?:敏感|违法)|不符合)",
)

BOILERPLATE: Final = (
    r"\bas an? (?:ai|artificial intelligence|(?:large )?language)(?: language)? (?:model|assistant)\b",
    r"\bi(?:'m| am) (?:just |only )?an? (?:ai|artificial intelligence|large)(?: language)? "
    r"(?:model|assistant|chatbot)\b",
    r"\bi(?:'m| am) chatgpt\b",
    r"\bi(?:'m| am| was)\b[^.!?]{0,80}\b(?:trained|developed|created|made) by "
    r"(?:openai|anthropic|google|meta|microsoft)\b",
    r"\bas of my (?:last|most recent|latest) (?:knowledge |training )?(?:update|cut-?off)\b",
    r"\bmy (?:knowledge|training)(?: data)? (?:cut-?off|(?:only )?(?:goes|extends) (?:up )?to)\b",
    rf"(?:作为|作為|身为){_ZH_SELF}",
    r"我(?:只)?是(?:一个|一款|一名|一種)?(?:由[^，。]{1,12}(?:训练|开发|研发)的)?(?:人工智能|AI|大型)?(?:语言模型|大语言模型)",
    r"我是[^。！？]{0,20}由\s*\w{2,12}\s*(?:公司)?(?:训练|开发|研发|打造)",
    r"截[至止](?:到)?我(?:的)?(?:知识|训练|最后|上次)",
    r"我的(?:知识|训练数据)(?:库)?(?:截止|更新)(?:到|至|于)?",
)

PAGE_LEFTOVERS: Final = (
    r"copy code",
    r"(?:regenerate|continue) (?:response|generating)",
    r"share ?gpt",
    r"share prompt",
    r"(?:!!)?there was an error generating a response\.?",
    r"(?:an error occurred|network error|something went wrong)\.? ?(?:if this issue persists.*|please try again.*)?",
    r"this content may violate our content policy.*",
    r"(?:以上|本)(?:内容|回答|文)由\s*(?:AI|人工智能|ChatGPT)\s*(?:自动)?生成.*",
    r"(?:点击|點擊)(?:展开|展開|查看|阅读)(?:全文|更多|原文)",
    r"未经(?:允许|授权|许可)[，,]?(?:不得|禁止|请勿)转载.*",
    r"(?:复制代码|複製代碼)",
)

WEB_BOILERPLATE: Final = (
    r"\blorem ipsum dolor\b",
    r"\b(?:please )?enable javascript\b.{0,40}\bbrowser\b",
    r"\bthis (?:web)?site uses cookies\b",
    r"\bsubscribe to our newsletter\b",
    r"(?:扫码|扫描二维码|长按)(?:关注|识别).{0,12}(?:公众号|二维码)",
    r"未经(?:允许|授权|许可)[，,]?(?:不得|禁止|请勿)转载",
    r"(?:本网站|本站)使用\s*cookie",
)

TEMPLATE_MARKS: Final = (
    r"<\|(?:im_start|im_end|im_sep|endoftext|start_header_id|end_header_id|eot_id|begin_of_text|user|assistant|system"
    r"|end|EOT|tool|observation)\|>",
    r"\[/?INST\]",
    r"<</?SYS>>",
    r"<｜(?:begin▁of▁sentence|end▁of▁sentence|User|Assistant)｜>",
    r"<(?:start_of_turn|end_of_turn)>",
    r"(?:^|\n)###\s?(?:Human|Assistant|Instruction|Response):",
)
"""Marks that chat templates write between turns; inside a turn they would end it, or teach the drafter to."""

ABOUT_MARKUP: Final = (
    r"\b(?:html|xml|svg|css|tags?|web ?(?:page|site)|markup|jsx|react|vue|angular)\b|网页|标签|前端|网站|代码"
)
"""A question that matches may be answered with bare tags."""


WINDOW: Final = 16
"""Characters: long enough that common phrases do not match, short enough to detect a loop of one word."""
MIN_CHARACTERS: Final = 160
"""Shorter texts are not checked: a refrain or a list of three similar items is not a loop."""
_MIN_LINE: Final = 12
"""Shorter lines (closing brackets, `return None`) repeat in any code."""
_RUN: Final = re.compile(r"([^\W\d_])\1{39,}")
"""One letter or ideograph at least forty times in a row."""
_NO_WORD: Final = re.compile(r"[\W_]+")
_MAX_CHARACTERS: Final = 50_000


def repeated_share(text: str, threshold: float = 0.0) -> float:
    """The larger of two shares: characters in lines that occurred before, windows that occurred before. From 0 to 1.

    threshold: the share above which the caller acts; 0 is returned for a text that compresses too little to reach it.
    """
    # in every run of forty, four letters six or seven apart are equal, and hardly anywhere else
    apart = zip(text[::20], text[6::20], text[13::20], text[19::20], strict=False)
    if any(a == b == c == d for a, b, c, d in apart) and _RUN.search(text):
        return 1.0
    if len(text) < MIN_CHARACTERS:
        return 0.0
    text = text[:_MAX_CHARACTERS]
    raw = text.encode("utf-8", errors="surrogatepass")
    # a text with the repeated share r compresses to about (1 - r) times the ratio of prose, which is at most 0.75
    if threshold and len(zlib.compress(raw, 1)) > 0.75 * (1 - threshold) * len(raw) + 64:
        return 0.0
    return max(_repeated_lines_share(text), _repeated_windows_share(text))


def _repeated_lines_share(text: str) -> float:
    seen_lines: set[str] = set()
    repeated = total = 0
    for line in text.split("\n"):
        stripped = _NO_WORD.sub(" ", line).strip()
        total += len(stripped)
        if len(stripped) < _MIN_LINE:
            continue
        if stripped in seen_lines:
            repeated += len(stripped)
        seen_lines.add(stripped)
    return repeated / total if total else 0.0


def _repeated_windows_share(text: str) -> float:
    squeezed = _NO_WORD.sub(" ", text)
    count = len(squeezed) - WINDOW + 1
    if len(squeezed) < MIN_CHARACTERS:
        return 0.0
    return 1.0 - len({squeezed[start : start + WINDOW] for start in range(count)}) / count
