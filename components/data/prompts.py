"""Prompts as every other room sees them: what is asked, in which split, and as token ids.

A prompt is plain text to be continued, or a chat (`messages`) to be answered; the tokenizer's chat template turns a
chat into text at answer time, so one Prompts artifact serves any target.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from components.contract import Prompts, UserError

SPLITS: Final = ("train", "validation", "test", "warm_up")


@dataclass(frozen=True)
class Prompt:
    """One prompt. Exactly one of `text` and `messages` is set.

    prompt_id: stable hash of workload and content; unique in the artifact.
    source:    the file it comes from; a stdlib file belongs to one side of the split only.
    reference: what a person answered, where known ("" otherwise).
    """

    prompt_id: str
    split: str
    workload: str
    source: str
    text: str | None
    messages: tuple[dict[str, str], ...] | None
    reference: str = ""

    def as_json(self) -> dict[str, Any]:
        """The line of `prompts.jsonl`."""
        asked = {"prompt": self.text} if self.messages is None else {"messages": list(self.messages)}
        return {
            "prompt_id": self.prompt_id,
            "split": self.split,
            "workload": self.workload,
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
            )
            found.append(prompt)
    return found


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """The prompt's token ids as the target is to see them, with a beginning-of-text token if the tokenizer adds one.

    A chat is rendered with the tokenizer's chat template and its generation prompt; without a template its turns are
    joined as "role: content" paragraphs. Never empty: a prompt that encodes to nothing is the bos token, or 0.
    """
    if prompt.messages is None:
        ids = list(tokenizer(prompt.text)["input_ids"])
    elif getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes its own
    else:
        ids = list(tokenizer(join_turns(prompt.messages))["input_ids"])
    return ids or [tokenizer.bos_token_id or 0]


def join_turns(messages: Sequence[dict[str, str]]) -> str:
    """A chat as plain text, for a tokenizer without a chat template."""
    turns = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n\n".join([*turns, "assistant:"])
