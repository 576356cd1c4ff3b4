"""A target trained on chats: its template writes what it has learnt from, and its answers end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pretraining import TINY

from components.contract import Context, Corpus, Target, UserError
from components.targets import pretrain_target
from components.targets.load import open_tokenizer
from components.targets.pretraining.plan import pack_documents
from components.targets.pretraining.quality import cut_chats
from components.targets.pretraining.tokenizer import (
    BOS_ID,
    EOS,
    EOS_ID,
    PAD_ID,
    ROLE_TOKENS,
    chat_text,
)

SETTINGS: dict[str, Any] = {**TINY, "vocab_size": 400, "num_processes": 1}


CHAT = [{"role": "user", "content": "天空是什么颜色？"}, {"role": "assistant", "content": "蓝色。 Blue."}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    for name, count in (("train", 60), ("held_out", 8)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for number in range(count):
                language, question, answer = (
                    ("zh", "第{}个数是多少？", "这个数是{}。") if number % 2 else ("en", "Which is {}?", "It is {}.")
                )
                said = [
                    {"role": "user", "content": question.format(number)},
                    {"role": "assistant", "content": answer.format(number) * 4},
                ]
                out.write(json.dumps({"id": f"{number}", "source": f"{language}/made", "text": chat_text(said)}) + "\n")
    info = {"markup": "roles", "source": "chats", "languages": {"train": {"en": 30, "zh": 30}}, "train_documents": 60}
    return Corpus(key="corpus", path=folder, info=info)


@pytest.fixture(scope="module")
def target(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    for name in ("out", "scratch"):
        (folder / name).mkdir()
    torch.set_num_threads(1)
    ctx = Context(key="target", out=folder / "out", scratch=folder / "scratch", num_threads=1)
    return pretrain_target(corpus, ctx=ctx, **SETTINGS)


def test_the_template_writes_what_the_target_has_learnt_from(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(target)
    (tmp_path / "one.jsonl").write_text(json.dumps({"source": "zh/made", "text": chat_text(CHAT)}) + "\n")
    learnt = pack_documents(tmp_path / "one.jsonl", tokenizer.backend_tokenizer, {}).tolist()
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == f"<|bos|>{chat_text(CHAT)}{EOS}"
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == learnt
    asked = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    assert prompt == learnt[: len(prompt)] and tokenizer.convert_ids_to_tokens(prompt[-1]) == "<|assistant|>"
    assert (learnt[0], learnt[-1]) == (BOS_ID, EOS_ID) and learnt.count(EOS_ID) == 2


def test_the_template_marks_the_answers_as_generated(target: Target) -> None:
    tokenizer = open_tokenizer(target)
    made = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    answer = [token for token, own in zip(made["input_ids"], made["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(answer) == f"蓝色。 Blue.{EOS}"


def test_roles_are_tokens_of_their_own_and_the_merges_never_saw_them(target: Target) -> None:
    tokenizer = open_tokenizer(target)
    assert [tokenizer.convert_tokens_to_ids(token) for token in ROLE_TOKENS] == [3, 4, 5, 6]
    assert not any("user" in token or "assist" in token for token in tokenizer.get_vocab() if token not in ROLE_TOKENS)


def test_quality_is_told_by_language_and_the_card_speaks_of_chats(target: Target) -> None:
    assert set(target.info["held_out_loss"]) <= {"en", "zh"} and target.info["loops"]["num_measured"] > 0
    card = (target.path / "README.md").read_text(encoding="utf-8")
    assert "en 30, zh 30: 60 chats" in card and "Python code" not in card
    json.loads((target.path / "config.json").read_text())


def test_prompts_of_chats_end_where_an_answer_begins(target: Target, corpus: Corpus) -> None:
    tokenizer = open_tokenizer(target).backend_tokenizer
    prompts, references = cut_chats(corpus.path / "held_out.jsonl", tokenizer)
    assert prompts.shape == (8, 64) and references.shape == (8, 96)
    assert set(prompts[:, -1].tolist()) == {tokenizer.token_to_id("<|assistant|>")}
    assert prompts[0, 0] == PAD_ID and EOS_ID in references[0].tolist()


def test_a_vocabulary_too_small_for_the_roles_is_one_line(corpus: Corpus, tmp_path: Path) -> None:
    for name in ("out", "scratch"):
        (tmp_path / name).mkdir()
    ctx = Context(key="target", out=tmp_path / "out", scratch=tmp_path / "scratch", num_threads=1)
    with pytest.raises(UserError, match=r"vocab_size: 260 .* use 263 or more"):
        pretrain_target(corpus, ctx=ctx, **{**SETTINGS, "vocab_size": 260})
