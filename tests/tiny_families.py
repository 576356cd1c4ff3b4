"""Tiny random models of this year's families, with every kind of layer that the family has.

`make_family` writes one as a folder in Hugging Face format; the tests of targets and of decoding run over all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_targets import VOCAB_SIZE, make_tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NUM_LAYERS = 8
Settings = dict[str, Any]
_COMMON: Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_EXPERTS: Settings = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT: Settings = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA: Settings = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_MAMBA: Settings = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_INDEXER: Settings = {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 16}
_WINDOW: Settings = {"sliding_window": 6}
_SCALED: Settings = {"logit_scale": 0.7}  # with their 1/16 a random model hardly prefers any token
_GEMMA: Settings = {**_WINDOW, "query_pre_attn_scalar": 8}


def _layers(*types: str) -> Settings:
    """layer_types that repeat `types`."""
    return {"layer_types": [types[number % len(types)] for number in range(NUM_LAYERS)]}


_SLIDING = _layers("sliding_attention", "sliding_attention", "full_attention")
_THREE_TO_ONE = _layers("linear_attention", "linear_attention", "linear_attention", "full_attention")
_SHORT_CONV = _layers("conv", "conv", "full_attention", "conv")

FAMILIES: Mapping[str, Settings] = {
    "afmoe": _EXPERTS,
    "apertus": {},
    "arcee": {},
    "bailing_hybrid": {**_EXPERTS, **_LATENT, "head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": 0.5},
    "bamba": {**_MAMBA, "attn_layer_indices": [2, 5]},
    "cohere": _SCALED,
    "cohere2": {**_WINDOW, **_SLIDING, **_SCALED},
    "deepseek_v2": {**_EXPERTS, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "deepseek_v32": {**_EXPERTS, **_LATENT, **_INDEXER},
    "dots1": _EXPERTS,
    "ernie4_5": {},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": {**_WINDOW, **_SLIDING},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.7},
    "gemma": {},
    "gemma2": {**_GEMMA, **_SLIDING},
    "gemma3_text": {**_GEMMA, **_SLIDING},
    "gemma4_text": {
        **_WINDOW,
        **_SLIDING,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
    },
    "glm4": {},
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": {**_EXPERTS, **_LATENT},
    "glm_moe_dsa": {**_EXPERTS, **_LATENT, **_INDEXER},
    "gpt2": {"n_layer": NUM_LAYERS, "n_head": 4, "n_embd": 32, "n_positions": 256},
    "gpt_neox": {},
    "gpt_oss": {**_EXPERTS, **_WINDOW, **_layers("sliding_attention", "full_attention")},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **_MAMBA,
        **_layers("mamba", "mamba", "attention", "mamba"),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "hunyuan_v1_dense": {},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
        "num_experts": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
    },
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
        },
    },
    "lfm2": {**_SHORT_CONV, "block_multiple_of": 8},
    "lfm2_moe": {**_SHORT_CONV, **_EXPERTS, "num_dense_layers": 1},
    "llama": {},
    "llama4_text": {
        **_EXPERTS,
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 1, 1, 0] * 2,
        "interleave_moe_layer_step": 2,
    },
    "mimo_v2_flash": {
        **_EXPERTS,
        **_WINDOW,
        "v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "minicpm3": {**_LATENT, "scale_emb": 2, "dim_model_base": 16},
    "minimax_m2": _EXPERTS,
    "ministral": _WINDOW,
    "ministral3": {},
    "mistral": _WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {},
    "nemotron_h": {
        **_EXPERTS,
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "mamba", "attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 4,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "olmo2": {},
    "olmo3": {**_WINDOW, **_SLIDING},
    "olmo_hybrid": {**_DELTA, **_THREE_TO_ONE},
    "olmoe": _EXPERTS,
    "phi3": _WINDOW,
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4},
    "qwen3": {},
    "qwen3_5_moe_text": {**_EXPERTS, **_DELTA, **_THREE_TO_ONE, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**_DELTA, **_THREE_TO_ONE},
    "qwen3_moe": _EXPERTS,
    "qwen3_next": {**_EXPERTS, **_DELTA, **_THREE_TO_ONE, "shared_expert_intermediate_size": 16},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": _EXPERTS,
    "starcoder2": {},
    "vaultgemma": {**_GEMMA, **_SLIDING},
    "zaya": {"num_hidden_layers": NUM_LAYERS},
}
"""Model type of transformers -> settings of its tiny model beside the common ones."""

REFUSED: Mapping[str, Settings] = {
    "bloom": {"n_layer": NUM_LAYERS, "n_head": 4},
    "deepseek_v4": {**_EXPERTS, **_LATENT},
    "gemma3n_text": {
        **_WINDOW,
        **_layers("sliding_attention", "sliding_attention", "sliding_attention", "full_attention"),
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
    },
    "mamba": {},
    "minimax": {**_EXPERTS, **_layers("linear_attention", "full_attention")},
}
MULTIMODAL: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "internvl": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Model type -> the family whose settings its text part takes."""
RECURRENT = (
    *("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zaya"),
)
"""Families with layers that keep a state."""
DRAWN = ("cohere", "cohere2", "gemma2", "gpt2", "gpt_neox", "granite", "llama", "phimoe", "starcoder2")
"""Families of every kind of norm and head: their biases and the weights of their norms are drawn as well."""
_VISION: Settings = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "out_hidden_size": 32,
}


def family_config(family: str) -> Any:
    """The configuration of a tiny model of this family."""
    if family not in MULTIMODAL:
        settings = {**_COMMON, **{**FAMILIES, **REFUSED}[family]}
        if family in ("gpt2", "gpt_neox"):  # their heads share nothing
            settings = {name: value for name, value in settings.items() if name != "num_key_value_heads"}
        return AutoConfig.for_model(family, **settings)
    text = family_config(MULTIMODAL[family]).to_dict()
    if family.startswith("qwen") and family.endswith(("_vl", "_vl_moe")):
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        text |= {"model_type": f"{family}_text", "rope_parameters": rope}
    return AutoConfig.for_model(family, text_config=text, vision_config=_VISION)


def family_model(family: str, seed: int = 0) -> Any:
    """A random model of this family in float32, whose outputs depend on the whole context."""
    config = family_config(family)
    causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model = kind.from_config(config).float().eval().requires_grad_(False)
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0.0, (2.0 if "router" in name or "gate." in name else 1.0) / weight.shape[-1] ** 0.5)
            elif family in DRAWN:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def make_family(family: str, folder: Path) -> Path:
    """Write the tiny model and its tokenizer into `folder`, which is returned."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_tiny_tokenizer(folder)
    family_model(family).save_pretrained(folder)
    return folder
