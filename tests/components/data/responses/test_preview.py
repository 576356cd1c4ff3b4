"""The sample shows what is masked in, and nothing of it is run by a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import STYLES, styled_tokenizer
from given_chats import prompts_of, said
from killed_step import context
from tiny_targets import VOCAB_SIZE, make_tiny_target

from components.contract import Target
from components.data import write_given_answers
from components.report.prefect_cards import answers_card
from components.targets import load_target

SETTINGS: dict[str, Any] = {"shard_size": 4, "max_set_aside": 0.5}


def target_with(style: str, folder: Path) -> Target:
    make_tiny_target("llama", folder / "model")
    styled_tokenizer(STYLES[style], VOCAB_SIZE).save_pretrained(folder / "model")
    return load_target(model=str(folder / "model"), ctx=context(folder / "artifact"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_with("chatml_marked", tmp_path_factory.mktemp("target"))


def test_a_strangers_text_is_shown_and_never_run(target: Target, tmp_path: Path) -> None:
    rows = [said(number, "<script>alert('x')</script>\u202e|`*") for number in range(1, 4)]
    made = write_given_answers(target, prompts_of(rows, tmp_path / "p"), **SETTINGS, ctx=context(tmp_path / "out"))
    page = (made.path / "sample.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "&lt;script&gt;" in page and "\u202e" not in page and "\\u202e" in page
    assert "<mark" in page and '<span class="user">Question 1?</span>' in page
    sample = json.loads((made.path / "sample.json").read_text(encoding="utf-8"))["rows"]
    assert [piece["text"] for piece in sample[0]["pieces"] if piece["role"] == "user"] == ["Question 1?", "再说一次"]
    assert all(piece["role"] in ("assistant", "template") for piece in sample[0]["pieces"] if piece["masked"])
    card = answers_card(made)
    assert "<script>" not in card.replace("\\<", "") and "sample.html" in card and "■" in card
