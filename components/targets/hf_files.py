"""Writes trained weights as a folder that transformers, vLLM, SGLang and llama.cpp's converter read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from components.targets.pretraining.llama import LlamaShape
from components.targets.pretraining.tokenizer import BOS_ID, EOS_ID, PAD_ID


def llama_config(shape: LlamaShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a tied LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def save_model(
    folder: Path, shape: LlamaShape, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config.json, generation_config.json and model.safetensors, each replaced in one move."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to(device="cpu", dtype=dtype).contiguous() for name, weight in weights.items()}
    partial_weights = folder / "model.safetensors.partial"
    save_file(tensors, partial_weights, metadata={"format": "pt"})
    os.replace(partial_weights, folder / "model.safetensors")
    generation = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "do_sample": False}
    for name, facts in (("config.json", llama_config(shape, dtype)), ("generation_config.json", generation)):
        partial = folder / f"{name}.partial"
        partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / name)
