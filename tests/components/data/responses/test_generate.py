"""Answers of tiny targets: greedy ones are the argmax of a plain pass, and they repeat bit for bit after a kill."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import Family, make_tiny_target

from components.contract import Context, Conversations, Prompts, Target, UserError
from components.data import collect_prompts, write_answers
from components.data.formats.responses import distinct_bigram_ratio, open_answers
from components.data.responses.generate import AnswerShard, Job, answer
from components.targets import load_target
from components.targets.load import open_target

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 12,
    "batch_size": 3,
    "shard_size": 5,
    "sampled_share": 0.5,
    "max_prompt_tokens": 400,
}


def context(folder: Path, events: list[Any] | None = None) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1, send=None if events is None else events.append)


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    family: Family = request.param
    return load_target(model=str(make_tiny_target(family, root / "model")), ctx=context(root / "artifact"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return collect_prompts(num_train=9, num_validation=4, num_test=2, ctx=context(tmp_path_factory.mktemp("prompts")))


@pytest.fixture(scope="module")
def answers(target: Target, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    return write_answers(target, prompts, **SETTINGS, ctx=context(tmp_path_factory.mktemp("answers")))


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("shard-*"))}


def test_masks_mark_the_answers_and_test_prompts_are_not_answered(
    target: Target, prompts: Prompts, answers: Conversations
) -> None:
    from components.data.formats.prompts import encode_prompt, read_prompts
    from components.targets.load import open_tokenizer

    tokenizer = open_tokenizer(target)
    asked = {
        p.prompt_id: encode_prompt(tokenizer, p)
        for split in ("train", "validation")
        for p in read_prompts(prompts, split)
    }
    answered = list(open_answers(answers).conversations())
    assert {row.row_id for row, _, _ in answered} == set(asked)
    for row, ids, mask in answered:
        assert ids[~mask].tolist() == asked[row.row_id]
        assert mask.tolist() == sorted(mask.tolist())
        assert int(mask.sum()) == row.num_answer_tokens <= 12
        assert row.distinct_bigrams == distinct_bigram_ratio(ids[mask].tolist())
    assert answers.info["num_sampled"] > 0
    assert all(row.temperature == 0.0 for row, _, _ in open_answers(answers).conversations("validation"))
    assert answers.info["num_answer_tokens"] == sum(row.num_answer_tokens for row, _, _ in answered)


def test_greedy_answers_are_the_argmax_of_a_plain_pass(target: Target, answers: Conversations) -> None:
    model = open_target(target, kernel="transformers")
    for row, ids, mask in open_answers(answers).conversations():
        if row.temperature == 0.0:
            logits = model.forward(ids[None], model.new_cache(1, len(ids))).logits
            assert logits is not None
            assert torch.equal(logits[0, :-1].argmax(-1)[mask[1:]], ids[1:][mask[1:]])


def test_the_end_of_text_token_belongs_to_the_answer_and_ends_it(
    target: Target, answers: Conversations, tmp_path: Path
) -> None:
    """The target says its second token again with that token declared the end of text."""
    row, ids, mask = next(iter(open_answers(answers).conversations("validation")))
    end = int(ids[mask][1])
    model = open_target(target, kernel="plain")
    model.shape = dataclasses.replace(model.shape, eos_token_ids=(end,))
    job = Job(row.row_id, row.split, row.workload, tuple(ids[~mask].tolist()), sampled=False)
    shard = AnswerShard(tmp_path / "one", (job,), 1, target.path, 12, 0.8, 0, "cpu", 1)
    (again,) = answer(model, shard, float)
    first = ids[mask].tolist().index(end)
    assert again.ids[again.mask].tolist() == ids[mask][: first + 1].tolist()
    assert again.row.ended and again.row.num_answer_tokens == first + 1
    assert again.ids[~again.mask].tolist() == list(job.ids)


def test_prompts_without_a_training_split_are_refused(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "天空"}\n{"prompt": "大海"}\n', encoding="utf-8")
    wanted: dict[str, Any] = {"num_train": 0, "num_validation": 0, "num_warm_up": 0, "evaluation_percent": 100}
    only_test = collect_prompts(source=str(file), **wanted, ctx=context(tmp_path / "prompts"))
    with pytest.raises(UserError, match="num_train"):
        write_answers(target, only_test, **SETTINGS, ctx=context(tmp_path / "answers"))


def test_answers_repeat_bit_for_bit_after_a_kill(
    target: Target, prompts: Prompts, answers: Conversations, tmp_path: Path
) -> None:
    finished = shards(answers.path)
    assert len(finished) == 3
    for lost in ([0], [1, 2], [2]):
        folder = tmp_path / str(lost)
        shutil.copytree(answers.path, folder)
        (folder / "manifest.json").unlink()
        for number in lost:
            (folder / f"shard-{number:05d}.safetensors").unlink()
        (folder / ".shard-00001.safetensors.0123.tmp").write_bytes(b"half a shard")
        again = write_answers(target, prompts, **SETTINGS, ctx=context(folder))
        assert shards(folder) == finished
        assert again.info == answers.info
        assert not list(folder.glob(".*"))


def test_finished_shards_are_not_computed_again(target: Target, prompts: Prompts, answers: Conversations) -> None:
    events: list[dict[str, Any]] = []
    write_answers(target, prompts, **SETTINGS, ctx=context(answers.path, events))
    assert not [event for event in events if event["event"] == "progress"]


def test_prompts_that_do_not_fit_are_counted_and_none_at_all_is_refused(
    target: Target, prompts: Prompts, answers: Conversations, tmp_path: Path
) -> None:
    lengths = sorted(row.num_prompt_tokens for row, _, _ in open_answers(answers).conversations())
    limit = lengths[len(lengths) // 2]
    settings = {**SETTINGS, "max_prompt_tokens": limit}
    some = write_answers(target, prompts, **settings, ctx=context(tmp_path / "some"))
    assert some.info["num_prompts_too_long"] == sum(length > limit for length in lengths)
    with pytest.raises(UserError, match="max_prompt_tokens"):
        write_answers(target, prompts, **{**SETTINGS, "max_prompt_tokens": 1}, ctx=context(tmp_path / "none"))
