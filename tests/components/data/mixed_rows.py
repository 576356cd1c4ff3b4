"""Rows to mix, a step run on them, and what came out."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.contract import Chats, Context, Prompts
from components.data import mix_chats
from components.data.formats.chats import Chat, ChatWriter
from components.data.formats.prompts import Prompt, read_prompts

WORDS = ("apple", "bird", "cloud", "door", "eagle", "flame", "garden", "house", "island", "jungle")


def row(source: str, number: int, words: int = 3, language: str = "en", domain: str = "general", **kw: Any) -> Chat:
    """A chat of one exchange whose answer has so many words."""
    question = kw.get("question", f"{source} question {number}?")
    answer = " ".join(WORDS[(number + n) % len(WORDS)] for n in range(words)) + f" {number}"
    messages = [*kw.get("before", []), {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Chat.of(
        source=source,
        where=f"{source}.jsonl:{number}",
        messages=[*messages, *kw.get("after", [])],
        language=language,
        domain=domain,
    )


def stored(root: Path, rows: Sequence[Chat], inputs: int = 1, rows_per_part: int = 50) -> list[Chats]:
    """The rows as Chats artifacts, one after the other."""
    made = []
    for number in range(inputs):
        place = root / uuid.uuid4().hex
        with ChatWriter(place, rows_per_part) as writer:
            for one in rows[number::inputs]:
                writer.write(one)
        made.append(Chats(key=f"c{number}", path=place))
    return made


def mixed(root: Path, chats: list[Chats], seed: int = 0, **settings_: Any) -> Prompts:
    place = root / uuid.uuid4().hex
    (place / "out").mkdir(parents=True)
    (place / "scratch").mkdir()
    ctx = Context(key="m", out=place / "out", scratch=place / "scratch", seed=seed)
    few = {"num_test": 2, "num_validation": 2, "num_warm_up": 1, "evaluation_percent": 20}
    return mix_chats(chats, ctx=ctx, **{**few, **settings_})


def trained(prompts: Prompts) -> list[Prompt]:
    return read_prompts(prompts, "train")


def got(prompts: Prompts, of: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in prompts.info["mix"] if entry["of"] == of}


SIZES = {"a": 200, "b": 40}


def two(root: Path) -> list[Chats]:
    return stored(root, [row(name, number, 6) for name, count in SIZES.items() for number in range(count)])


def counts_of(prompts: Prompts) -> dict[str, int]:
    return {name: entry["rows"] for name, entry in got(prompts, "source").items()}
