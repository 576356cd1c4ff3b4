"""A shard of conversations is read as it was written, with its notes; an artifact lists its shards.

The sample shows what is masked in, and nothing of it is run by a browser.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from given_chats import prompts_of, said, target_with
from killed_step import context

from components.contract import Context, Conversations, Target, UserError
from components.data import write_given_answers
from components.data.formats.responses import (
    AnswerRow,
    Conversation,
    distinct_bigram_ratio,
    open_answers,
    read_notes,
    read_shard,
    shard_name,
    summarise,
    write_manifest,
    write_shard,
)
from components.report.prefect_cards import answers_card


def conversation(row_id: str, split: str, ids: list[int], language: str = "en") -> Conversation:
    """A conversation whose first two tokens are the prompt."""
    mask = torch.tensor([False, False] + [True] * (len(ids) - 2))
    ratio = distinct_bigram_ratio(ids[2:])
    row = AnswerRow(row_id, split, "chat", 0.0, 2, len(ids) - 2, True, ratio, language)
    return Conversation(row, torch.tensor(ids), mask)


def test_a_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = [conversation("a", "train", [1, 2, 3, 4]), conversation("b", "validation", [5, 6, 7], "zh")]
    write_shard(tmp_path / "x.safetensors", written, {"counts": {"read": 2}})
    read = read_shard(tmp_path / "x.safetensors")
    assert [one.row for one in read] == [one.row for one in written]
    for one, other in zip(read, written, strict=True):
        assert torch.equal(one.ids, other.ids) and torch.equal(one.mask, other.mask)
    assert read_notes(tmp_path / "x.safetensors") == {"counts": {"read": 2}}
    write_shard(tmp_path / "empty.safetensors", [])
    assert read_shard(tmp_path / "empty.safetensors") == [] and read_notes(tmp_path / "empty.safetensors") == {}


def test_an_artifact_lists_its_shards_and_its_summary_counts_their_rows(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a Conversations artifact"):
        open_answers(Conversations("k", tmp_path))
    ctx = Context(key="k", out=tmp_path, scratch=tmp_path)
    names = [shard_name(0), shard_name(1)]
    write_shard(
        tmp_path / names[0], [conversation("a", "train", [1, 2, 3, 4]), conversation("b", "train", [1, 2, 3, 4])]
    )
    write_shard(tmp_path / names[1], [conversation("c", "validation", [1, 2, 9, 9, 9, 9, 9, 9, 9], "zh")])
    write_manifest(ctx, "target", names, 2)
    answers = open_answers(Conversations("k", tmp_path))
    assert [one.row.row_id for one in answers.conversations("train")] == ["a", "b"]
    info = summarise(ctx, answers.shards)
    assert (info["num_rows"], info["num_answer_tokens"]) == ({"train": 2, "validation": 1}, 11)
    assert (info["num_duplicate_answers"], info["num_looping"]) == (1, 1)
    assert info["languages"] == {"zh": 7, "en": 4}


def test_distinct_bigrams() -> None:
    assert distinct_bigram_ratio([1, 2, 3, 4]) == 1.0
    assert distinct_bigram_ratio([1, 1, 1, 1, 1]) == 0.25
    assert distinct_bigram_ratio([1]) == 1.0


SETTINGS: dict[str, Any] = {"shard_size": 4, "max_set_aside": 0.5}


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
