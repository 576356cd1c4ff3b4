"""Pre-training: resume is exact, the decay can be moved, the files load elsewhere, the tokenizer loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_pretraining import SETTINGS, make_context

from components.contract import Corpus, Target, UserError
from components.targets import pretrain_target
from components.targets.pretraining.llama import LeanLlama, LlamaShape
from components.targets.pretraining.tokenizer import BOS_ID, EOS_ID, PAD_ID


@pytest.fixture(scope="module")
def target(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return pretrain_target(corpus, **SETTINGS, num_processes=2, ctx=make_context(tmp_path_factory.mktemp("made")))


def test_the_saved_model_loads_in_transformers_with_the_logits_it_was_trained_to(target: Target) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    weights = {name: weight.float() for name, weight in load_file(target.path / "model.safetensors").items()}
    lean = LeanLlama(LlamaShape(**target.info["plan"]["shape"]), weights, torch.float32)
    tokens = tokenizer("def train(values):\n    total = 0\n", return_tensors="pt").input_ids
    torch.testing.assert_close(lean.logits(tokens), model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (BOS_ID, EOS_ID, PAD_ID)


def test_the_facts_and_the_card_come_from_what_was_measured(target: Target) -> None:
    info, card = target.info, (target.path / "README.md").read_text(encoding="utf-8")
    assert set(info["held_out_loss"]) == {"stdlib", "stdlib-tests"}
    assert all(f"{loss:.3f} nats/token" in card for loss in info["held_out_loss"].values())
    assert f"{info['loops']['real']:.3f}" in card and f"{info['num_params']:,}" in card
    assert 0 < info["loops"]["real"] <= 1 and 0 <= info["loops"]["greedy"] <= 1
    assert info["tokens_seen"] == SETTINGS["num_steps"] * SETTINGS["tokens_per_step"]
    assert str(target.path) not in json.dumps(dict(info)) + card


def test_two_processes_share_a_step_and_agree_with_one(corpus: Corpus, target: Target, tmp_path: Path) -> None:
    alone = pretrain_target(corpus, **SETTINGS, num_processes=1, ctx=make_context(tmp_path))
    ours, theirs = (load_file(made.path / "model.safetensors") for made in (alone, target))
    for name in ours:
        assert (ours[name].float() - theirs[name].float()).abs().mean() < 0.02, name


def test_a_finished_run_called_again_changes_nothing(corpus: Corpus, tmp_path: Path) -> None:
    ctx = make_context(tmp_path)
    first = pretrain_target(corpus, **SETTINGS, num_processes=1, ctx=ctx)
    files = {path.name: path.read_bytes() for path in ctx.out.iterdir() if path.name != "README.md"}
    again = pretrain_target(corpus, **SETTINGS, num_processes=1, ctx=ctx)
    assert {path.name: path.read_bytes() for path in ctx.out.iterdir() if path.name != "README.md"} == files
    assert again.info["held_out_loss"] == first.info["held_out_loss"]


def test_tokens_that_do_not_divide_evenly_are_refused_in_one_line(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use a multiple of 512"):
        pretrain_target(corpus, **{**SETTINGS, "tokens_per_step": 640}, num_processes=2, ctx=make_context(tmp_path))
