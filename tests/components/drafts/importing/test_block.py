"""The block of a checkpoint is read with Llama's own defaults, and scaled positions are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign_drafts import LLAMA3, YARN
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from components.drafts.importing.block import EAGLE_TYPES, read_block, read_own_block
from components.drafts.importing.reader import Faults
from components.drafts.network.layers import BlockShape, rope_frequencies, rope_tables
from components.targets.shape import TargetShape, shape_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 96, "head_dim": 64}


def target_shape(**changes: Any) -> TargetShape:
    return shape_of(LlamaConfig(**{**SIZES, "num_hidden_layers": 8, **changes}), "tiny")


@pytest.mark.parametrize(
    "scaling",
    [
        *({}, LLAMA3, {"rope_type": "linear", "factor": 4.0}, YARN),
        {**YARN, "truncate": False, "attention_factor": 1.3},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_slow": 3.0},
    ],
    ids=["plain", "llama3", "linear", "yarn", "yarn without truncation", "yarn by mscale"],
)
def test_rotary_frequencies_are_those_of_transformers(scaling: dict[str, Any]) -> None:
    config = LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", **scaling, "rope_theta": 5000.0})
    target: Any = SimpleNamespace(shape=target_shape())
    own = {"rope_theta": 5000.0, **({"rope_scaling": tuple(scaling.items())} if scaling else {})}
    ours = rope_frequencies(BlockShape.of(target, 0, own), torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    positions = torch.arange(50)
    cos, _ = rope_tables(BlockShape.of(target, 0, own), positions)
    torch.testing.assert_close(cos, theirs(torch.zeros(1), positions[None])[0][0], rtol=1e-5, atol=1e-5)


def test_absent_fields_have_the_defaults_of_a_llama_configuration() -> None:
    faults = Faults("here")
    block = read_block({name: SIZES[name] for name in SIZES if name != "head_dim"}, faults)
    plain = LlamaConfig(**{**SIZES, "head_dim": None})
    assert block is not None and not faults.found
    assert (block.head_dim, block.num_key_value_heads) == (plain.head_dim, plain.num_key_value_heads)
    assert (block.rms_norm_eps, block.max_position_embeddings) == (plain.rms_norm_eps, plain.max_position_embeddings)
    assert block.rope_theta == plain.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32', no size"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, no size"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, no positive number"),
        ({"rope_theta": 5.0, "rope_scaling": {"rope_theta": 6.0}}, "rope_theta is 5.0 at one place and 6.0 at another"),
        ({"rope_scaling": [1]}, "rope_scaling is [1], no mapping"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 9}, "asks for a window; such drafters attend"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None, must be a number"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "asks for a window, but not for one"),
        ({"use_sliding_window": True}, "asks for a window, but not for one"),
        ({"layer_types": True}, "layer_types is True, no list"),
        ({"model_type": "gemma"}, "model_type is 'gemma', whose block"),
    ],
)
def test_a_field_that_cannot_be_is_said(change: dict[str, Any], said: str) -> None:
    faults = Faults("here")
    assert read_block({**SIZES, **change}, faults) is None
    assert said in "; ".join(faults.found)


def test_what_is_not_the_targets_becomes_a_setting_and_a_remark_or_a_fault() -> None:
    faults, remarks = Faults("here"), list[str]()
    block = read_block({**SIZES, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, faults)
    assert block is not None
    own = read_own_block(block, target_shape(), faults, remarks)
    assert own == {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert not faults.found and len(remarks) == 2
    read_own_block(replace(block, rope={"rope_type": "dynamic", "factor": 2.0}), target_shape(), faults, remarks)
    assert "rope_type dynamic" in faults.found[0]


def test_absent_fields_of_a_block_with_norms_are_qwen3s() -> None:
    faults, sizes = Faults("here"), {name: SIZES[name] for name in SIZES if name != "head_dim"}
    block = read_block({**sizes, "model_type": "qwen3"}, faults, model_types=EAGLE_TYPES)
    plain = Qwen3Config(**sizes)
    assert block is not None and block.qk_norm and not faults.found
    assert (block.head_dim, block.num_key_value_heads) == (plain.head_dim, plain.num_key_value_heads)


def test_what_transformers_fills_in_of_yarn_is_written_down() -> None:
    faults = Faults("here")
    rope = {"type": "yarn", "original_max_position_embeddings": 512, "attention_factor": None}
    block = read_block({**SIZES, "max_position_embeddings": 2048, "rope_scaling": rope}, faults)
    assert block is not None and not faults.found
    assert block.rope == {"rope_type": "yarn", "original_max_position_embeddings": 512, "factor": 4.0}
    block = read_block(
        {**SIZES, "max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 2.0}}, faults
    )
    assert block is not None and block.rope["original_max_position_embeddings"] == 64
