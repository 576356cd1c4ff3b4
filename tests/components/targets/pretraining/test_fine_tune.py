"""A fine-tuned target: better at the new text, changed in every matrix, and a model folder like the old one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_pretraining import make_context
from tiny_targets import make_tiny_target

from components.contract import Corpus, Target, UserError
from components.targets import fine_tune_target, load_target
from components.targets.load import open_target, open_tokenizer
from components.targets.pretraining.fine_tune import lr_scale, token_stream

SETTINGS: dict[str, Any] = {"num_steps": 6, "peak_lr": 3e-3, "tokens_per_step": 128, "sequence_length": 32}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("tuned")
    folder = make_tiny_target("llama", root / "model")
    return load_target(model=str(folder), ctx=make_context(root / "loaded"))


@pytest.fixture(scope="module")
def changed(target: Target, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return fine_tune_target(target, corpus, **SETTINGS, ctx=make_context(tmp_path_factory.mktemp("changed")))


def source(target: Target) -> Path:
    return Path(json.loads((target.path / "target.json").read_text())["folder"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_it_learns_the_new_text_and_changes_every_matrix(target: Target, changed: Target) -> None:
    assert changed.info["held_out_loss"] < changed.info["held_out_loss_before"] - 0.1
    before, after = weights(source(target)), weights(changed.path)
    assert before.keys() == after.keys()
    assert {name: (w.shape, w.dtype) for name, w in before.items()} == {n: (w.shape, w.dtype) for n, w in after.items()}
    assert not [name for name, w in before.items() if w.ndim == 2 and torch.equal(w, after[name])]


def test_it_opens_like_any_target_and_loads_as_a_folder(target: Target, changed: Target, tmp_path: Path) -> None:
    opened = open_target(changed)
    ids = torch.tensor([open_tokenizer(changed)("def add(a, b):")["input_ids"]])
    assert torch.isfinite(opened.forward(ids, opened.new_cache(1, 64)).logits).all()  # type: ignore[arg-type]
    assert open_tokenizer(changed).get_vocab() == open_tokenizer(target).get_vocab()
    again = load_target(model=str(changed.path), ctx=make_context(tmp_path))
    assert again.info["shape"] == target.info["shape"] and changed.info["fine_tuned_from"] == target.key


def test_the_same_settings_give_the_same_weights(
    target: Target, changed: Target, corpus: Corpus, tmp_path: Path
) -> None:
    again = fine_tune_target(target, corpus, **SETTINGS, ctx=make_context(tmp_path))
    assert all(torch.equal(w, weights(changed.path)[name]) for name, w in weights(again.path).items())


def test_each_document_ends_with_the_targets_end_token(target: Target, corpus: Corpus) -> None:
    tokenizer = open_tokenizer(target)
    stream = token_stream(corpus, "held_out", tokenizer, "here")
    assert int((stream == tokenizer.eos_token_id).sum()) == 4 and stream[-1] == tokenizer.eos_token_id


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    rates = [lr_scale(step, 100, 0.1) for step in range(100)]
    assert rates[9] == rates[10] == 1.0 and rates[0] == 0.1
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.1 < rates[-1] < 0.101


def test_what_cannot_be_done_is_told_in_one_line(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokens_per_step: 100 is no multiple"):
        fine_tune_target(target, corpus, tokens_per_step=100, sequence_length=32, ctx=make_context(tmp_path / "a"))
    with pytest.raises(UserError, match=r"held-out tokens of .* too few"):
        fine_tune_target(
            target, corpus, tokens_per_step=1 << 16, sequence_length=1 << 16, ctx=make_context(tmp_path / "b")
        )
    document = json.dumps({"id": "1", "source": "en/1", "text": "<|bos|><|user|>hello<|eos|>"}) + "\n"
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(document)
    chats = Corpus(key="chats", path=tmp_path, info={})
    with pytest.raises(UserError, match=r"written with <\|user\|>, which .* does not know"):
        fine_tune_target(target, chats, **SETTINGS, ctx=make_context(tmp_path / "c"))
