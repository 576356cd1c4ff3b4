"""What a token costs in the KV cache: the formula of each attention, held against the bytes that transformers keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import make_tiny_tokenizer

from components.contract import Context
from components.targets import load_target
from components.targets.shape import MIN_LAYERS, kv_bytes_per_token, taps_of

LAYERS, HEADS, HEAD_DIM = 8, 4, 16
LATENT, ROTARY = 24, 8
GROUPED = {"MHA": 4, "GQA": 2, "MQA": 1}
"""Key/value heads: as many as query heads, fewer, one."""
NUMBERS = {
    **{name: 2 * LAYERS * heads * HEAD_DIM for name, heads in GROUPED.items()},
    "MLA": LAYERS * (LATENT + ROTARY),  # the compressed latent and the one decoupled rotary key; no heads in it
    "GQA, experts": 2 * LAYERS * 2 * HEAD_DIM,
}


def model_of(attention: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPED.get(attention, HEADS),
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "bos_token_id": None,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if attention == "MLA":
        latent = {
            "kv_lora_rank": LATENT,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": ROTARY,
            "v_head_dim": HEAD_DIM,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
        }
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**common, **experts, **latent))
    if attention == "GQA, experts":
        common |= {"num_key_value_heads": 2, "num_experts": 4, "head_dim": HEAD_DIM}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common, **experts))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, head_dim=HEAD_DIM))


def test_taps_are_three_layers_before_the_last_and_the_usual_ones_where_those_exist() -> None:
    for num_layers in range(MIN_LAYERS, 200):
        first, second, third = taps_of(num_layers)
        assert 0 < first < second < third < num_layers
        assert num_layers < 7 or (first, second, third) == (2, num_layers // 2, num_layers - 3)


@pytest.mark.parametrize("attention", NUMBERS)
def test_bytes_per_token_are_those_of_the_formula_and_of_the_cache(attention: str, tmp_path: Path) -> None:
    model, num_tokens = model_of(attention).float().eval(), 7
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, num_tokens, dtype=torch.int64), use_cache=True).past_key_values
    kept = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    assert kept == num_tokens * NUMBERS[attention] * 4
    assert kv_bytes_per_token(model.config, 4) == NUMBERS[attention] * 4
    assert kv_bytes_per_token(model.config, 2) == NUMBERS[attention] * 2

    folder = tmp_path / "model"
    make_tiny_tokenizer(folder)
    model.save_pretrained(folder)
    (tmp_path / "out").mkdir()
    target = load_target(model=str(folder), ctx=Context(key="t", out=tmp_path / "out", scratch=tmp_path))
    assert target.info["kv_bytes_per_token"] == NUMBERS[attention] * 4  # what `draftsmith show` prints
