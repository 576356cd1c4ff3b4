"""A stand-in has the architecture, layers, head size, vocabulary and tokenizer of its target, and few weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import context
from tiny_families import FAMILIES, MULTIMODAL, family_config
from tiny_targets import make_tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from components.contract import UserError
from components.targets.config import has_text_part
from components.targets.load import open_target
from components.targets.shape import layer_types_of, shape_of
from components.targets.stand_in import make_stand_in, shrink

NO_DEFAULTS = {"dots1", "hunyuan_v1_dense", "lfm2_moe", "ministral"}
"""Families whose class has no usable default values: nobody can make a model of them."""
MOST_PARAMETERS = 600e6
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "eos_token_id": [128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def write_config(folder: Path, config: dict[str, Any], *, tokenizer: bool = False) -> Path:
    """A folder with a configuration, and no weights."""
    folder.mkdir()
    if tokenizer:
        make_tiny_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("family", sorted({*FAMILIES, *MULTIMODAL} - NO_DEFAULTS))
def test_every_family_at_its_usual_size_has_a_small_stand_in(family: str) -> None:
    full = AutoConfig.for_model(family)
    small = shrink(full, family)
    before, after = shape_of(full, family), shape_of(small, family)
    for same in ("num_layers", "vocab_size", "head_dim", "max_position_embeddings", "rope_scaling", "eos_token_ids"):
        if (family, same) != ("gemma3", "vocab_size"):
            assert getattr(before, same) == getattr(after, same), same
    text, full_text = small.get_text_config(decoder=True), full.get_text_config(decoder=True)
    assert layer_types_of(text) == layer_types_of(full_text)
    kind = AutoModelForImageTextToText if has_text_part(small) else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(small)
    assert sum(weight.numel() for weight in model.parameters()) < MOST_PARAMETERS


def test_it_is_opened_and_decodes_as_any_target_and_keeps_the_tokenizer(tmp_path: Path) -> None:
    config = {**family_config("qwen3").to_dict(), "hidden_size": 4096, "num_attention_heads": 32}
    folder = write_config(tmp_path / "model", config, tokenizer=True)
    (folder / "generation_config.json").write_text('{"suppress_tokens": [3]}')
    target = make_stand_in(model=str(folder), ctx=context(tmp_path / "made"))
    assert target.info["shape"]["hidden_size"] < 4096 and target.info["suppressed_tokens"] == [3]
    assert (target.path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    opened = open_target(target, kernel="plain", dtype="float32")
    out = opened.forward(torch.tensor([[3, 4, 5]]), opened.new_cache(1, 3))
    assert out.logits is not None and bool(out.logits.isfinite().all())


def test_a_configuration_alone_is_enough_and_what_is_not_tried_is_said(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", {**LLAMA, "num_hidden_layers": 4})
    said: list[str] = []
    ctx = dataclasses.replace(context(tmp_path / "made"), send=lambda event: said.append(str(event.get("message", ""))))
    assert make_stand_in(model=str(folder), ctx=ctx).info["shape"]["head_dim"] == 128
    assert any("its chat template is not tried" in line for line in said)


def test_a_configuration_that_is_no_target_is_refused_in_one_line(tmp_path: Path) -> None:
    wrong_ones = {
        "2 layers": {"num_hidden_layers": 2},
        "eos_token_id": {"eos_token_id": 200_000},
        "config.json cannot be used": {"model_type": "t5"},
    }
    for number, (match, wrong) in enumerate(wrong_ones.items()):
        folder = write_config(tmp_path / str(number), {**LLAMA, **wrong})
        with pytest.raises(UserError, match=match) as caught:
            make_stand_in(model=str(folder), ctx=context(tmp_path / f"made{number}"))
        assert "\n" not in str(caught.value)
