"""Tiny targets whose checkpoints hold a module of their own, in the layouts that transformers drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_targets import make_tiny_target, make_tiny_tokenizer
from torch import Tensor

LAYOUTS = ("deepseek", "qwen", "mimo", "ernie")
PARTS = {
    "deepseek": ("model.layers.8.", "enorm", "hnorm", "eh_proj", "", "shared_head.norm"),
    "qwen": ("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm"),
    "mimo": ("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "", "final_layernorm"),
    "ernie": ("model.mtp_", "emb_norm.0", "hidden_norm.0", "linear_proj.0", "block.0.", ""),
}
LAYERS = {"ernie": 0}
"""The target's layer that the module's block is like; the last one of 8 where none stands here."""


def make_own_checkpoint(layout: str, directory: Path) -> Path:
    """A target of eight layers of the family that has this layout, and an MTP module of random weights beside it."""
    import transformers

    if layout == "deepseek":
        make_tiny_target("deepseek_v3", directory)
    elif layout == "mimo":
        make_tiny_target("qwen3", directory)
    else:
        make_tiny_tokenizer(directory)
        sizes: dict[str, Any] = {
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "moe_intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "bos_token_id": None,
        }
        config: Any = transformers.Ernie4_5_MoeConfig(**sizes, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1)
        if layout == "qwen":
            experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 48}
            config = transformers.Qwen3NextConfig(**sizes, **experts, layer_types=["full_attention"] * 8)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.5 if "embed" in name or "lm_head" in name else 0.1)
        model.save_pretrained(directory)
    save_file(own_tensors(layout, directory), directory / "zz-mtp.safetensors", metadata={"format": "pt"})
    return directory


def own_tensors(layout: str, directory: Path) -> dict[str, Tensor]:
    """The module as stored: a layer of the target, moved a little, and the parts around it."""
    generator = torch.Generator().manual_seed(3)
    prefix, token_norm, hidden_norm, projection, block, last_norm = PARTS[layout]
    layer = f"model.layers.{LAYERS.get(layout, 7)}."
    like = {n: t for n, t in stored_tensors(directory).items() if n.startswith(layer)}
    ones = torch.zeros(64) if layout == "qwen" else torch.ones(64)  # the (1 + w) form starts at zero
    joined = torch.randn(64, 128, generator=generator) * 128**-0.5
    tensors: dict[str, Tensor] = {
        f"{prefix}{token_norm}.weight": ones + 0.1 * torch.randn(64, generator=generator),
        f"{prefix}{hidden_norm}.weight": ones + 0.1 * torch.randn(64, generator=generator),
        f"{prefix}{last_norm}.weight": ones + 0.1 * torch.randn(64, generator=generator),
        f"{prefix}{projection}.weight": joined,
    }
    if not last_norm:
        del tensors[f"{prefix}.weight"]
    for name, tensor in like.items():
        moved = tensor + 0.02 * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        tensors[name.replace(layer, prefix + block)] = moved
    if layout == "deepseek":  # as DeepSeek's files repeat the shared tensors
        tensors[f"{prefix}embed_tokens.weight"] = stored_tensors(directory)["model.embed_tokens.weight"].clone()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def stored_tensors(directory: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found
