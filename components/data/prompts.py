"""Prompts as every other room sees them: what is asked, in which split, and as token ids.

A prompt is plain text to be continued, or a chat (`messages`) to be answered; the tokenizer's chat template turns a
chat into text at answer time, so one Prompts artifact serves any target.
"""

from __future__ import annotations

import datetime
import functools
import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from components.contract import Prompts, UserError
from components.data.control_marks import ids_of_unmarked_chat, refuse_marked_text

SPLITS: Final = ("train", "validation", "test", "warm_up")
RENDER_WITHIN_S: Final = 30.0
"""What a chat template may take for one chat; a thousand turns take a tenth of a second."""
MAX_RENDERED_CHARS: Final = 50_000_000
"""What a chat template may write for one chat: ten times a context of a million tokens."""
_FIXED_DAY: Final = datetime.date(2024, 7, 26)
"""What chat templates that ask are told to be today: the day that Llama's own templates fall back to."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. Exactly one of `text` and `messages` is set.

    prompt_id: stable hash of workload and content; unique in the artifact.
    source:    the file it comes from; a stdlib file belongs to one side of the split only.
    reference: what a person answered, where known ("" otherwise).
    language:  code of the language that the answer is to be written in (en, zh), where known ("" otherwise).
    domain:    what it is about (code, mathematics, ...), where known ("" otherwise).
    tools:     the tools that a chat may call, as the chat template takes them; None where there are none.
    conversation: the whole chat as its source has it, the source's own answers too; None where it had none.
    place:     where a declared order of training (data.mix_chats) has it, 0 first; None where none was declared.
    """

    prompt_id: str
    split: str
    workload: str
    source: str
    text: str | None
    messages: tuple[dict[str, Any], ...] | None
    reference: str = ""
    language: str = ""
    domain: str = ""
    tools: tuple[dict[str, Any], ...] | None = None
    conversation: tuple[dict[str, Any], ...] | None = None
    place: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The line of `prompts.jsonl`; what a prompt does not have is left out of it."""
        asked = {"prompt": self.text} if self.messages is None else {"messages": list(self.messages)}
        known: dict[str, Any] = {"domain": self.domain} if self.domain else {}
        if self.tools is not None:
            known["tools"] = list(self.tools)
        if self.conversation is not None:
            known["conversation"] = list(self.conversation)
        if self.place is not None:
            known["place"] = self.place
        return {
            "prompt_id": self.prompt_id,
            "split": self.split,
            "workload": self.workload,
            "language": self.language,
            "source": self.source,
            **asked,
            "reference": self.reference,
            **known,
        }


def read_prompts(prompts: Prompts, split: str) -> list[Prompt]:
    """The prompts of one split ("train", "validation", "test", "warm_up") in their stored order."""
    assert split in SPLITS, split
    file = prompts.path / "prompts.jsonl"
    if not file.is_file():
        raise UserError(f"{prompts.path}: no prompts.jsonl: not a Prompts artifact; make one with data.collect_prompts")
    found = []
    with file.open(encoding="utf-8") as lines:  # not str.splitlines: texts may hold U+2028 and its like
        for line in lines:
            row = json.loads(line)
            if row["split"] != split:
                continue
            found.append(prompt_of(row))
    return found


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """The prompt of one line of `prompts.jsonl`; fields that older files lack are as if not known."""
    return Prompt(
        prompt_id=row["prompt_id"],
        split=row["split"],
        workload=row["workload"],
        source=row["source"],
        text=row.get("prompt"),
        messages=_tuple_or_none(row.get("messages")),
        reference=row.get("reference", ""),
        language=row.get("language", ""),
        domain=row.get("domain", ""),
        tools=_tuple_or_none(row.get("tools")),
        conversation=_tuple_or_none(row.get("conversation")),
        place=row.get("place"),
    )


def _tuple_or_none(found: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...] | None:
    return None if found is None else tuple(found)


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids as the target is to see them, with a beginning-of-text token if the tokenizer adds one.

    A chat is rendered with the tokenizer's chat template and its generation prompt; without a template its turns are
    joined as "role: content" paragraphs. Never empty: a prompt that encodes to nothing is the bos token, or 0.

    Raises HoldsControlMark where a text of the prompt would become a control token.
    """
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None):
        turns = accepted_turns(tokenizer, prompt.messages, prompt.tools)
        render = functools.partial(render_chat, tokenizer, tools=prompt.tools)
        ids = ids_of_unmarked_chat(tokenizer, turns, prompt.tools, render)  # the template writes the special ones
    else:
        text = join_turns(prompt.messages) if prompt.messages is not None else str(prompt.text)
        refuse_marked_text(tokenizer, text)
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        end = tokenizer.eos_token_id
        if ids and ids[-1] == end:
            ids.pop()  # some tokenizers close every text, and nothing continues a closed text
    return ids or [tokenizer.bos_token_id or 0]


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    generation_prompt: bool = True,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The chat as the template writes it, the same on every day; raises UserError where the template refuses it.

    options: further variables that the template reads, such as {"enable_thinking": False}.
    """
    try:
        with _within(RENDER_WITHIN_S):
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                chat_template=same_day_template(tokenizer, tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **(options or {}),
            )
    except TimeoutError as error:
        raise UserError(f"the target's chat template has not written a chat within {RENDER_WITHIN_S:g} s") from error
    except Exception as error:  # a template is a stranger's program: it may divide by zero, recurse, ask for 10 GB
        reason = " ".join((str(error) or type(error).__name__).split())[:200]
        raise UserError(
            f"the target's chat template refuses a chat ({reason}); use another source or target"
        ) from error
    if len(text) > MAX_RENDERED_CHARS:  # a tokenizer needs some ten times that much memory, and aborts without it
        raise UserError(f"the target's chat template writes {len(text):,} characters for one chat; use another target")
    return text


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """TimeoutError where what is inside takes longer: loops in a template are a stranger's.

    A clock needs the main thread, where steps run, and no other clock; elsewhere there is no limit.
    """
    in_use = signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, signal.SIG_IGN)
    if in_use or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def accepted_turns(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The turns as this template takes them: a system prompt that it refuses opens the user's turn instead."""
    turns = [_with_open_arguments(message) for message in messages]
    if len(turns) < 2 or turns[0]["role"] != "system" or turns[1]["role"] != "user":
        return turns
    try:
        render_chat(tokenizer, turns[:2], tools=tools)
        return turns
    except UserError:  # of the merged turns it says itself what it refuses
        first, second, *rest = turns
        return [{"role": "user", "content": f"{first['content']}\n\n{second['content']}"}, *rest]


def _with_open_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as objects, as templates take them; OpenAI's API writes them as a text of JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function")
        function = dict(inner if isinstance(inner, Mapping) else call)
        try:
            opened = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):  # an object already, or no JSON: as it stands
            opened = function.get("arguments")
        if isinstance(opened, dict):
            function["arguments"] = opened
        calls.append({**call, "function": function} if isinstance(inner, Mapping) else function)
    return {**message, "tool_calls": calls}


def same_day_template(tokenizer: Any, tools: Sequence[dict[str, Any]] | None = None) -> str:
    """The tokenizer's chat template, told that it is the fixed day: what is resumed tomorrow must not differ."""
    template: str = tokenizer.get_chat_template(tools=None if tools is None else list(tools))
    return _same_day_macro() + template if "strftime_now" in template else template


def _same_day_macro() -> str:
    """Jinja: a `strftime_now` that hides the tokenizer's own and always says the fixed day."""
    said = "".join(f".replace('%{code}', '{_FIXED_DAY.strftime('%' + code)}')" for code in "aAbBdHjmMSyY")
    # "+%}": the template's own first line break stays
    return "{% macro strftime_now(format) %}{{ format" + said + " }}{% endmacro +%}"


def join_turns(messages: Sequence[dict[str, Any]]) -> str:
    """A chat as plain text, for a tokenizer without a chat template."""
    turns = [f"{message['role']}: {message.get('content') or ''}" for message in messages]
    return "\n\n".join([*turns, "assistant:"])
