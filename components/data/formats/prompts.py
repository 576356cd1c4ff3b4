"""The prompt record that all rooms share, `prompts.jsonl`, what makes two prompts equal, and encoding to token ids.

A prompt is plain text to be continued, or a chat (`messages`) to be answered. A chat becomes text only when it is
answered, by the tokenizer's chat template, so one Prompts artifact serves any target.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.contract import Prompts, UserError
from components.data.formats.control_marks import HoldsControlMark, ids_of_unmarked_chat, refuse_marked_text
from components.data.sources.turns import Message
from components.outside_json import JsonObject

Tool = JsonObject
"""The description of a tool, in the format of chat templates."""
SPLITS: Final = ("train", "validation", "test", "warm_up")
RENDER_WITHIN_S: Final = 30.0
"""Time limit of a chat template for one chat, seconds; a thousand turns take a tenth of a second."""
MAX_RENDERED_CHARS: Final = 50_000_000
"""Size limit of a rendered chat, characters: ten times a context of a million tokens."""
_FIXED_DAY: Final = datetime.date(2024, 7, 26)
"""The date that chat templates get as today: the one that Llama's own templates fall back to."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. Exactly one of `text` and `messages` is set.

    prompt_id: stable hash of workload and content; unique in the artifact.
    source:    the file it comes from; a stdlib file belongs to one split only.
    reference: a person's answer, "" where unknown.
    language:  code of the language of the answer (en, zh), "" where unknown.
    domain:    the subject (code, mathematics, ...), "" where unknown.
    tools:     the tools that a chat may call, in the format of chat templates; None without tools.
    conversation: the whole chat of the source with the source's answers; None without one.
    place:     the position in a declared training order (data.mix_chats), from 0; None without such an order.
    """

    prompt_id: str
    split: str
    workload: str
    source: str
    text: str | None
    messages: tuple[Message, ...] | None
    reference: str = ""
    language: str = ""
    domain: str = ""
    tools: tuple[Tool, ...] | None = None
    conversation: tuple[Message, ...] | None = None
    place: int | None = None

    @property
    def num_characters(self) -> int:
        """Length of the question."""
        return len(self.text or "") + sum(len(message["content"]) for message in self.messages or ())

    def as_json(self) -> JsonObject:
        """The JSON object in `prompts.jsonl`; optional fields without a value are omitted."""
        question = {"prompt": self.text} if self.messages is None else {"messages": list(self.messages)}
        optional: JsonObject = {"domain": self.domain} if self.domain else {}
        if self.tools is not None:
            optional["tools"] = list(self.tools)
        if self.conversation is not None:
            optional["conversation"] = list(self.conversation)
        if self.place is not None:
            optional["place"] = self.place
        return {
            "prompt_id": self.prompt_id,
            "split": self.split,
            "workload": self.workload,
            "language": self.language,
            "source": self.source,
            **question,
            "reference": self.reference,
            **optional,
        }


def read_prompts(prompts: Prompts, split: str) -> list[Prompt]:
    """The prompts of one split ("train", "validation", "test", "warm_up") in stored order; raises UserError."""
    assert split in SPLITS, split
    file = prompts.path / "prompts.jsonl"
    if not file.is_file():
        raise UserError(f"{prompts.path}: no prompts.jsonl: not a Prompts artifact; make one with data.collect_prompts")
    with file.open(encoding="utf-8") as lines:  # not str.splitlines: texts may hold U+2028 and its like
        rows = (json.loads(line) for line in lines)
        return [parse_prompt(row) for row in rows if row["split"] == split]


def write_prompts(directory: Path, prompts: Iterable[Prompt]) -> None:
    """Write `prompts.jsonl` of a Prompts artifact."""
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(prompt.as_json(), ensure_ascii=False) + "\n" for prompt in prompts)


def parse_prompt(row: JsonObject) -> Prompt:
    """The prompt of one JSON object of `prompts.jsonl`; older files may lack optional fields."""
    fields = {name: row[name] for name in Prompt.__dataclass_fields__ if name in row}
    lists = {name: tuple(row[name]) for name in ("messages", "tools", "conversation") if row.get(name) is not None}
    return Prompt(**{"messages": None, **fields, **lists, "text": row.get("prompt")})


def question_of(prompt: Prompt) -> str:
    """The question with white space normalised: the text, or the user turns (without the system prompt)."""
    if prompt.messages is None:
        return _spaced(prompt.text or "")
    return _spaced("\n".join(message["content"] for message in prompt.messages if message["role"] == "user"))


def content_of(prompt: Prompt) -> str:
    """All text of a prompt with white space normalised: two prompts with equal content are the same."""
    return _spaced(prompt.text if prompt.text is not None else json.dumps(prompt.messages, ensure_ascii=False))


def hash_number(text: str) -> int:
    """A hash below 2**64 that depends on the text alone, on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


def _spaced(text: str) -> str:
    return " ".join(text.split())


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids for the target, with a beginning-of-text token if the tokenizer adds one.

    A chat is rendered with the tokenizer's chat template and its generation prompt; without a template its turns are
    joined as "role: content" paragraphs. The result is never empty: an empty prompt is the bos token, or 0.

    Raises HoldsControlMark where text of the prompt would become a control token.
    """
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None):
        turns = accepted_turns(tokenizer, prompt.messages, prompt.tools)
        render = functools.partial(render_chat, tokenizer, tools=prompt.tools)
        ids = ids_of_unmarked_chat(tokenizer, turns, prompt.tools, render)  # only the template may write control tokens
    else:
        text = join_turns(prompt.messages) if prompt.messages is not None else str(prompt.text)
        refuse_marked_text(tokenizer, text)
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        end = tokenizer.eos_token_id
        if ids and ids[-1] == end:
            ids.pop()  # some tokenizers close every text, and nothing continues a closed text
    return ids or [tokenizer.bos_token_id or 0]


def encode_text(tokenizer: Any, text: str, *, as_chat: bool) -> list[int]:
    """The token ids of what a person types: a text to be continued, or the user's turn of a chat.

    Raises UserError where it holds a control mark.
    """
    turn: Message = {"role": "user", "content": text}
    prompt = Prompt("", "test", "", "", None if as_chat else text, (turn,) if as_chat else None)
    try:
        return encode_prompt(tokenizer, prompt)
    except HoldsControlMark as error:
        raise UserError(f"prompt: {error}; leave the mark out") from error


def prompt_format(prompts: Sequence[Prompt]) -> str:
    """What most of these prompts are: "chat", or "text" to be continued."""
    return "chat" if 2 * sum(prompt.messages is not None for prompt in prompts) > len(prompts) else "text"


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    generation_prompt: bool = True,
    options: JsonObject | None = None,
) -> str:
    """The chat as text of the template, independent of the date; raises UserError where the template refuses it.

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
    except Exception as error:  # templates are untrusted programs: they may divide by zero, recurse, ask for 10 GB
        reason = " ".join((str(error) or type(error).__name__).split())[:200]
        raise UserError(
            f"the target's chat template refuses a chat ({reason}); use another source or target"
        ) from error
    if len(text) > MAX_RENDERED_CHARS:  # a tokenizer needs about ten times as much memory, and aborts without it
        raise UserError(f"the target's chat template writes {len(text):,} characters for one chat; use another target")
    return text


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds.

    The signal's timer needs the main thread, where steps run, and no other handler; elsewhere there is no limit.
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


def accepted_turns(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> list[Message]:
    """The turns in a form that the template accepts: a refused system prompt is put before the user's first turn."""
    turns = [_with_parsed_arguments(message) for message in messages]
    if len(turns) < 2 or turns[0]["role"] != "system" or turns[1]["role"] != "user":
        return turns
    try:
        render_chat(tokenizer, turns[:2], tools=tools)
        return turns
    except UserError:  # if it refuses the merged turns too, rendering them raises
        first, second, *rest = turns
        return [{"role": "user", "content": f"{first['content']}\n\n{second['content']}"}, *rest]


def _with_parsed_arguments(message: Message) -> Message:
    """The message with the arguments of tool calls as objects, for templates; OpenAI's API has them as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        inner = call.get("function")
        function = dict(inner if isinstance(inner, Mapping) else call)
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (TypeError, ValueError):  # already an object, or not JSON: unchanged
            arguments = function.get("arguments")
        if isinstance(arguments, dict):
            function["arguments"] = arguments
        calls.append({**call, "function": function} if isinstance(inner, Mapping) else function)
    return {**message, "tool_calls": calls}


def same_day_template(tokenizer: Any, tools: Sequence[Tool] | None = None) -> str:
    """The tokenizer's chat template with a fixed date, because a run resumed tomorrow must not differ."""
    template: str = tokenizer.get_chat_template(tools=None if tools is None else list(tools))
    return _same_day_macro() + template if "strftime_now" in template else template


def _same_day_macro() -> str:
    """A Jinja macro `strftime_now` that hides the tokenizer's own and always returns the fixed date."""
    replacements = "".join(f".replace('%{code}', '{_FIXED_DAY.strftime('%' + code)}')" for code in "aAbBdHjmMSyY")
    # "+%}": the template's own first line break stays
    return "{% macro strftime_now(format) %}{{ format" + replacements + " }}{% endmacro +%}"


def join_turns(messages: Sequence[Message]) -> str:
    """A chat as plain text, for a tokenizer without a chat template."""
    turns = [f"{message['role']}: {message.get('content') or ''}" for message in messages]
    return "\n\n".join([*turns, "assistant:"])
