"""The table of rows: each row becomes a prompt, and its tokens are counted or estimated."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixed_rows import got, mixed, row, stored

from components.contract import Target
from components.data.formats.chats import Chat
from components.data.formats.prompts import SPLITS, read_prompts
from components.targets.source import BUILTIN, local_folder


def test_a_prompt_asks_the_first_exchange_and_carries_the_whole_chat(tmp_path: Path) -> None:
    before = [{"role": "system", "content": "Be brief."}]
    after = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No more."}]
    text = Chat.of(source="t", where="t:1", text="It was a dark and stormy night; the rain fell in torrents. " * 12)
    asked = Chat.of(source="t", where="t:2", messages=[{"role": "user", "content": "Nobody answers?"}])
    silent = Chat.of(source="t", where="t:3", messages=[{"role": "system", "content": "Nobody asks."}])
    rows = [*(row("a", n, before=before, after=after) for n in range(60)), text, asked, silent]
    found = mixed(tmp_path, stored(tmp_path, rows), evaluation_percent=10)
    prompts = {prompt.prompt_id: prompt for split in SPLITS for prompt in read_prompts(found, split)}
    one = next(prompt for prompt in prompts.values() if prompt.source == "a")
    assert one.messages is not None and [m["role"] for m in one.messages] == ["system", "user"]
    assert one.conversation is not None and [m["role"] for m in one.conversation[2:]] == [
        "assistant",
        "user",
        "assistant",
    ]
    assert one.reference == one.conversation[2]["content"]
    whole = prompts[text.row_id]
    assert whole.text and whole.messages is None and whole.text + whole.reference == text.text
    assert prompts[asked.row_id].conversation is None
    assert found.info["dropped"]["no_question"] == 1


def test_the_target_counts_where_it_is_given_and_languages_are_estimated_apart(tmp_path: Path) -> None:
    folder = local_folder(BUILTIN)
    assert folder is not None
    rows = [row("a", n, language="en") for n in range(40)] + [row("b", n, language="zh") for n in range(40)]
    chats = stored(tmp_path, rows)
    estimated, exact = (mixed(tmp_path, chats, by="rows", **kw) for kw in ({}, {"target": Target(key="", path=folder)}))
    assert exact.info["tokens_are"] == "counted by the target" != estimated.info["tokens_are"]
    guessed = {name: entry["tokens"] / entry["rows"] for name, entry in got(estimated, "source").items()}
    assert guessed["b"] / guessed["a"] == pytest.approx(4.0 / 1.6, rel=0.15)
