"""Which checkpoints our own forward pass can run: told by the configuration and the exact set of tensor names.

A checkpoint with one tensor more or less than expected is another architecture under a known name, and goes to
transformers rather than being read wrongly.
"""

from __future__ import annotations

from typing import Any

from components.targets.shape import rope_parameters, sliding_window

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ROPE_TYPES = frozenset({"default", "llama3", "linear"})


def is_supported(config: Any, names: set[str]) -> bool:
    """Can FastTarget run this configuration with these tensors? Anything else goes to TransformersTarget."""
    if config.model_type not in FAMILIES or config.hidden_act != "silu" or sliding_window(config):
        return False
    if rope_parameters(config).get("rope_type", "default") not in ROPE_TYPES:
        return False
    if rope_parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return names == expected_names(config, names)


def expected_names(config: Any, present: set[str]) -> set[str]:
    """The tensor names of such a checkpoint; biases of the attention projections and lm_head count where present."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        names |= {f"{at}self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {f"{at}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {f"{at}input_layernorm.weight", f"{at}post_attention_layernorm.weight"}
        if config.model_type == "qwen3":
            names |= {f"{at}self_attn.q_norm.weight", f"{at}self_attn.k_norm.weight"}
        names |= {f"{at}self_attn.{part}_proj.bias" for part in "qkvo"} & present
    head = {"lm_head.weight"}
    return names | (head & present if config.tie_word_embeddings else head)
