"""Which checkpoints our own forward pass can run: told by the configuration and the exact set of tensor names.

A checkpoint with one tensor more or less than expected is another architecture under a known name, and goes to
transformers rather than being read wrongly.
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
        joined = {f"{at}self_attn.{part}_proj.bias" for part in "qkv"}  # one linear layer: all of them or none
        names |= (joined if joined & present else set()) | ({f"{at}self_attn.o_proj.bias"} & present)
    head = {"lm_head.weight"}
    return names | (head & present if config.tie_word_embeddings else head)


def check_shapes(shape: TargetShape, found: Mapping[str, list[int]], where: str) -> None:
    """A UserError where a tensor of such a checkpoint is not of the shape that its configuration tells.

    found: the shape of every tensor, by its name.
    """
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
    for name, is_there in found.items():
        wanted = by_ending[".".join(name.split(".")[-2:])]
        if is_there != wanted:
            raise UserError(
                f"{where}: {name} is {is_there}, and config.json asks for {wanted}: they do not go together"
            )
