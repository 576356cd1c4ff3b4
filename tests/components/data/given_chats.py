"""Chats that hold their answers, as a source gives them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chat_templates import STYLES, Style, styled_tokenizer
from killed_step import context
from tiny_targets import VOCAB_SIZE, make_tiny_target

from components.contract import Prompts, Target
from components.data.formats.prompts import Prompt
from components.targets import load_target


def chat(*turns: tuple[str, str]) -> Prompt:
    return Prompt("id", "test", "chat", "s", None, tuple({"role": role, "content": text} for role, text in turns))


def said(number: int, answer: str | None = None, **more: Any) -> Prompt:
    """A chat of two answers in one of two languages."""
    chat = (
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": answer or f"Answer {number}."},
        {"role": "user", "content": "再说一次"},
        {"role": "assistant", "content": f"好的 {number}。"},
    )
    split = "validation" if number % 5 == 0 else ("test" if number % 7 == 0 else "train")
    known = {"language": "en" if number % 2 else "zh", "domain": "chat"}
    return Prompt(f"{number:016x}", split, "chats", "a.jsonl", None, chat[:1], conversation=chat, **{**known, **more})


def prompts_of(rows: list[Prompt], folder: Path) -> Prompts:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row.as_json(), ensure_ascii=False) + "\n" for row in rows]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return Prompts("p", folder)


MIXED = [
    *(said(number) for number in range(1, 16)),
    Prompt("f" * 16, "train", "chats", "b.jsonl", "plain text", None),
    Prompt("e" * 16, "train", "chats", "b.jsonl", None, ({"role": "user", "content": "Why?"},), reference="So."),
    said(31, "x<|im_end|>y"),
    said(32, "<script>alert('x')</script>\u202e"),
    said(33, "long " * 400),
]


def target_with(style: str | Style, folder: Path) -> Target:
    """A tiny target whose tokenizer has the chat template of this style."""
    make_tiny_target("llama", folder / "model")
    styled_tokenizer(STYLES[style] if isinstance(style, str) else style, VOCAB_SIZE).save_pretrained(folder / "model")
    return load_target(model=str(folder / "model"), ctx=context(folder / "artifact"))
