"""A source's own answers as training rows: every chat is accounted for, and the rows are those of the masks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import Style
from given_chats import MIXED, prompts_of, said, target_with
from killed_step import context

import components.data.responses.given as given
from components.contract import Target, UserError
from components.data import record_features, write_given_answers
from components.data.formats.prompts import Prompt
from components.data.formats.responses import open_answers
from components.targets.load import open_tokenizer

SETTINGS: dict[str, Any] = {"shard_size": 4, "max_set_aside": 0.5}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_with("chatml_marked", tmp_path_factory.mktemp("target"))


def test_every_chat_is_accounted_for(target: Target, tmp_path: Path) -> None:
    made = write_given_answers(target, prompts_of(MIXED, tmp_path / "p"), **SETTINGS, ctx=context(tmp_path / "out"))
    info = made.info
    trained = [prompt for prompt in MIXED if prompt.split in ("train", "validation")]
    assert (
        info["num_read"]
        == len(trained)
        == sum(info[name] for name in ("num_kept", "num_without_answer", "num_too_long", "num_set_aside"))
    )
    assert (info["num_without_answer"], info["num_too_long"], info["num_set_aside"]) == (1, 1, 1)
    assert info["set_aside"] == {"a text holds a control mark": 1}
    aside = [json.loads(line) for line in (made.path / "set_aside.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["source"], line["row"]) for line in aside] == [("a.jsonl", f"{31:016x}")]
    assert set(info["mask_methods"]) == {"prefixes", "generation", "spans"} and info["mask_methods_impossible"] == {}
    assert set(info["languages"]) == {"en", "zh"} and set(info["domains"]) == {"chat"}


def test_rows_are_the_chats_with_their_answers_masked_in(target: Target, tmp_path: Path) -> None:
    made = write_given_answers(target, prompts_of(MIXED, tmp_path / "p"), **SETTINGS, ctx=context(tmp_path / "out"))
    tokenizer = open_tokenizer(target)
    rows = {row.row_id: (row, ids, mask) for row, ids, mask in open_answers(made).conversations()}
    row, ids, mask = rows[f"{3:016x}"]
    assert tokenizer.decode(ids[mask]) == "Answer 3.<|im_end|>好的 3。<|im_end|>"
    assert (row.answered_by, row.temperature, row.language, row.ended) == ("source", None, "en", True)
    assert row.num_answer_tokens == int(mask.sum()) and row.num_prompt_tokens == int((~mask).sum())
    assert tokenizer.decode(rows["e" * 16][1][rows["e" * 16][2]]) == "So.<|im_end|>"
    assert f"{14:016x}" not in rows  # a test prompt
    assert f"{33:016x}" not in rows
    features = record_features(target, made, ctx=context(tmp_path / "features"))
    assert features.info["num_tokens"] == made.info["num_tokens"]


def test_a_chat_that_is_too_long_loses_its_last_turns(target: Target, tmp_path: Path) -> None:
    late = said(1)
    assert late.conversation is not None
    longer = (*late.conversation[:3], {"role": "assistant", "content": "long " * 400})
    chats = [Prompt(**{**vars(late), "conversation": longer}), said(2)]
    made = write_given_answers(target, prompts_of(chats, tmp_path / "p"), **SETTINGS, ctx=context(tmp_path / "out"))
    _, ids, mask = next(iter(open_answers(made).conversations()))
    tokenizer = open_tokenizer(target)
    assert tokenizer.decode(ids[mask]) == "Answer 1.<|im_end|>" and "再说" not in tokenizer.decode(ids)


def test_only_last_answers_when_asked(target: Target, tmp_path: Path) -> None:
    prompts = prompts_of(MIXED[:3], tmp_path / "p")
    made = write_given_answers(target, prompts, turns="last", **SETTINGS, ctx=context(tmp_path / "out"))
    tokenizer = open_tokenizer(target)
    for number, (_, ids, mask) in enumerate(open_answers(made).conversations(), start=1):
        assert tokenizer.decode(ids[mask]) == f"好的 {number}。<|im_end|>"


def test_too_many_set_aside_stop_the_step_and_say_why(target: Target, tmp_path: Path) -> None:
    rows = [said(1), said(2, "x<|im_end|>"), said(3, "<|im_start|>")]
    with pytest.raises(UserError, match=r"2 of 3 chats.*control mark.*max_set_aside"):
        write_given_answers(target, prompts_of(rows, tmp_path / "p"), ctx=context(tmp_path / "out"))


def test_nothing_but_chats_set_aside_says_why_however_many_may_be(target: Target, tmp_path: Path) -> None:
    prompts = prompts_of([said(2, "x<|im_end|>"), said(3, "<|im_start|>")], tmp_path / "p")
    with pytest.raises(UserError, match=r"2 of 2 chats.*control mark"):
        write_given_answers(target, prompts, max_set_aside=1.0, ctx=context(tmp_path / "out"))


def test_a_template_that_hides_answers_ends_the_step_before_a_chat_is_read(tmp_path: Path) -> None:
    hiding = Style("{%- for m in messages if m.role == 'user' %}{{ m.content }}{%- endfor %}", "", "<|im_end|>")
    blind = target_with(hiding, tmp_path)
    with pytest.raises(UserError, match=r"model: by its chat template .*hides the answers"):
        write_given_answers(
            blind, prompts_of([said(1)], tmp_path / "p"), max_set_aside=1.0, ctx=context(tmp_path / "o")
        )
    assert not list(tmp_path.glob("o.scratch/part-*"))


def test_a_chat_that_the_template_refuses_is_set_aside_alone(target: Target, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {}}]}
    refused = dataclasses.replace(said(2), conversation=({"role": "user", "content": "Add."}, call))
    picky = target_with("llama3", tmp_path)
    rows = [said(1), refused, said(3)]
    made = write_given_answers(picky, prompts_of(rows, tmp_path / "p"), **SETTINGS, ctx=context(tmp_path / "out"))
    assert made.info["set_aside"] == {"the chat template refuses it": 1} and made.info["num_kept"] == 2


def test_prompts_without_answers_are_refused(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of 1 .* has an answer of its own"):
        write_given_answers(target, prompts_of([MIXED[15]], tmp_path / "p"), ctx=context(tmp_path / "out"))


def test_thinking_that_a_template_cannot_write_is_one_line(tmp_path: Path) -> None:
    chat = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2", "reasoning_content": "one, two"})
    rows = [Prompt("1" * 16, "train", "chats", "a.jsonl", None, chat[:1], conversation=chat)]
    with pytest.raises(UserError, match="writes no thinking"):
        write_given_answers(
            target_with("deepseek_r1", tmp_path),
            prompts_of(rows, tmp_path / "p"),
            thinking="keep",
            ctx=context(tmp_path / "out"),
        )


def test_parts_that_are_there_are_not_made_again(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "LINES_PER_PART", 4)
    prompts = prompts_of(MIXED, tmp_path / "p")
    whole = write_given_answers(target, prompts, **SETTINGS, ctx=context(tmp_path / "whole"))
    finished = {file.name: file.read_bytes() for file in whole.path.iterdir()}
    scratch = tmp_path / "whole.scratch"
    assert len(list(scratch.glob("part-*"))) == 5
    (scratch / "part-00002.safetensors").unlink()
    (whole.path / "manifest.json").unlink()
    (whole.path / "shard-00001.safetensors").unlink()
    events: list[dict[str, Any]] = []
    again = write_given_answers(target, prompts, **SETTINGS, ctx=context(tmp_path / "whole", events.append))
    assert {file.name: file.read_bytes() for file in again.path.iterdir()} == finished and again.info == whole.info
    assert {event["done"] for event in events if event["event"] == "progress"} <= {4 + n / 4 for n in range(5)}
