"""Decides which checkpoints our own forward pass can run, by their configuration and exact set of tensor names.

A checkpoint with one tensor more or less than expected is another architecture under a known name; transformers runs
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.contract import UserError
from components.targets.model import TargetShape
from components.targets.shape import rope_parameters, sliding_window

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ROPE_TYPES = frozenset({"default", "llama3", "linear"})


def is_supported(config: Any, names: set[str]) -> bool:
    """Whether FastTarget can run this configuration with these tensors; else TransformersTarget does."""
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
        prefix = f"model.layers.{layer}."
        names |= {f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"}
        if config.model_type == "qwen3":
            names |= {f"{prefix}self_attn.q_norm.weight", f"{prefix}self_attn.k_norm.weight"}
        joined = {f"{prefix}self_attn.{part}_proj.bias" for part in "qkv"}  # one linear layer: all of them or none
        names |= (joined if joined & present else set()) | ({f"{prefix}self_attn.o_proj.bias"} & present)
    head = {"lm_head.weight"}
    return names | (head & present if config.tie_word_embeddings else head)


def check_shapes(shape: TargetShape, tensor_shapes: Mapping[str, list[int]], location: str) -> None:
    """Raises UserError where a tensor has another shape than config.json implies. tensor_shapes: by tensor name."""
    width, head_dim = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "o": width}
    by_ending = {f"{part}_proj.bias": [rows] for part, rows in outputs.items()}
    by_ending |= {f"{part}_proj.weight": [rows, width] for part, rows in outputs.items()}
    by_ending |= {"o_proj.weight": [width, queries], "down_proj.weight": [width, shape.intermediate_size]}
    by_ending |= {f"{part}_proj.weight": [shape.intermediate_size, width] for part in ("gate", "up")}
    by_ending |= {"embed_tokens.weight": [shape.vocab_size, width], "lm_head.weight": [shape.vocab_size, width]}
    by_ending |= {f"{part}_norm.weight": [head_dim] for part in "qk"}
    by_ending |= {f"{norm}.weight": [width] for norm in ("norm", "input_layernorm", "post_attention_layernorm")}
    for name, tensor_shape in tensor_shapes.items():
        expected = by_ending[".".join(name.split(".")[-2:])]
        if tensor_shape != expected:
            raise UserError(
                f"{location}: {name} is {tensor_shape}, and config.json asks for {expected}: they do not go together"
            )
