"""Prompts as every other room sees them: what is asked, in which split, and as token ids.

A prompt is plain text to be continued, or a chat (`messages`) to be answered; the tokenizer's chat template turns a
chat into text at answer time, so one Prompts artifact serves any target.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from components.contract import Prompts, UserError

SPLITS: Final = ("train", "validation", "test", "warm_up")
_FIXED_DAY: Final = datetime.date(2024, 7, 26)
"""What chat templates that ask are told to be today: the day that Llama's own templates fall back to."""


@dataclass(frozen=True)
class Prompt:
    """One prompt. Exactly one of `text` and `messages` is set.

    prompt_id: stable hash of workload and content; unique in the artifact.
    source:    the file it comes from; a stdlib file belongs to one side of the split only.
    reference: what a person answered, where known ("" otherwise).
    language:  code of the language that the answer is to be written in (en, zh), where known ("" otherwise).
    """

    prompt_id: str
    split: str
    workload: str
    source: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None
    reference: str = ""
    language: str = ""

    def as_json(self) -> dict[str, Any]:
        """The line of `prompts.jsonl`."""
        asked = {"prompt": self.text} if self.messages is None else {"messages": list(self.messages)}
        return {
            "prompt_id": self.prompt_id,
            "split": self.split,
            "workload": self.workload,
            "language": self.language,
            "source": self.source,
            **asked,
            "reference": self.reference,
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
            messages = row.get("messages")
            prompt = Prompt(
                prompt_id=row["prompt_id"],
                split=row["split"],
                workload=row["workload"],
                source=row["source"],
                text=row.get("prompt"),
                messages=None if messages is None else tuple(messages),
                reference=row.get("reference", ""),
                language=row.get("language", ""),
            )
            found.append(prompt)
    return found


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids as the target is to see them, with a beginning-of-text token if the tokenizer adds one.

    A chat is rendered with the tokenizer's chat template and its generation prompt; without a template its turns are
    joined as "role: content" paragraphs. Never empty: a prompt that encodes to nothing is the bos token, or 0.
    """
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None):
        text = _rendered(tokenizer, prompt.messages)
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])  # the template writes its own
    else:
        text = join_turns(prompt.messages) if prompt.messages is not None else str(prompt.text)
        ids = list(tokenizer(text, verbose=False)["input_ids"])
        end = tokenizer.eos_token_id
        if ids and ids[-1] == end and not text.endswith(tokenizer.eos_token):
            ids.pop()  # some tokenizers close every text, and nothing continues a closed text
    return ids or [tokenizer.bos_token_id or 0]


def _rendered(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str:
    """The chat as text, the same on every day; a system prompt that the template refuses opens the user's turn."""
    import jinja2

    try:
        template: str = tokenizer.get_chat_template()
        if "strftime_now" in template:  # answers resumed tomorrow would not be those begun today
            template = _same_day_macro() + template
        text: str = tokenizer.apply_chat_template(
            list(messages), chat_template=template, tokenize=False, add_generation_prompt=True
        )
        return text
    except (jinja2.TemplateError, ValueError) as error:  # ValueError: several templates, none the default
        if messages[0]["role"] == "system" and len(messages) > 1:
            first, second, *rest = messages
            merged = {"role": second["role"], "content": f"{first['content']}\n\n{second['content']}"}
            if second["role"] == "user":
                return _rendered(tokenizer, [merged, *rest])
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"the target's chat template refuses a chat ({reason}); use another source or target"
        ) from error


def _same_day_macro() -> str:
    """Jinja: a `strftime_now` that hides the tokenizer's own and always says the fixed day."""
    said = "".join(f".replace('%{code}', '{_FIXED_DAY.strftime('%' + code)}')" for code in "aAbBdHjmMSyY")
    # "+%}": the template's own first line break stays
    return "{% macro strftime_now(format) %}{{ format" + said + " }}{% endmacro +%}"


def join_turns(messages: Sequence[dict[str, str]]) -> str:
    """A chat as plain text, for a tokenizer without a chat template."""
    turns = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, "assistant:"])
