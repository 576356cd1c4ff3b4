"""MTP modules under DeepSeek-V3's names: `model.layers.{n + j}.*`, n = the target's layers, j = 0 .. modules - 1.

Each module is one decoder block between a join (`enorm`, `hnorm`, `eh_proj`, embedding first) and `shared_head.norm`.
The embedding and the LM head are the target's own and are referenced, not copied: DeepSeek's files repeat them as
`embed_tokens` and `shared_head.head`, and a checkpoint that does so is accepted here as well. The block is a Llama
block (grouped-query attention, SwiGLU), not DeepSeek's latent attention and experts: an engine needs a dense reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from components.publish.eagle3_layout import check_vocabulary
from components.publish.exact_check import LaidOut, Spec, check_tensors
from components.targets.model import TargetShape


def lay_out(tensors: Mapping[str, Tensor], shape: TargetShape, record: Mapping[str, Any]) -> LaidOut:
    """Check an MTP drafter's tensors against its target and give them their config.json.

    tensors: the drafter's state dict, in the names above; d2t and t2d (our pruned head) are checked and left out,
        because an engine drafts with the target's whole head.
    record: draft.json; its `first_hidden` says whether module 0 reads the target's hidden state after its final norm
        (post_norm, what vLLM feeds) or before it (pre_norm).
    Raises UserError, one line, for anything an engine might load wrongly.
    """
    where = "mtp checkpoint"
    vocabulary = {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
    if vocabulary:
        size = int(record["draft_vocab_size"])
        specs = {"d2t": Spec((size,), torch.int64), "t2d": Spec((shape.vocab_size,), torch.bool)}
        check_tensors(vocabulary, specs, where)
        check_vocabulary(vocabulary["d2t"], vocabulary["t2d"], where)
    weights = {name: tensor for name, tensor in tensors.items() if name not in vocabulary}
    settings = record["settings"]
    num_modules = int(settings.get("mtp_modules") or record["num_steps"])
    intermediate_size = int(settings.get("intermediate_size") or shape.intermediate_size)
    check_tensors(weights, expected_tensors(shape, num_modules, intermediate_size), where)
    dtype = weights[f"model.layers.{shape.num_layers}.eh_proj.weight"].dtype
    first_hidden = str(settings.get("first_hidden", "post_norm"))
    return LaidOut(mtp_config(shape, num_modules, intermediate_size, dtype, first_hidden), weights)


def expected_tensors(shape: TargetShape, num_modules: int, intermediate_size: int) -> dict[str, Spec]:
    """Every tensor of the layout with its shape; the shared ones are optional."""
    hidden = shape.hidden_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    expected: dict[str, Spec] = {}
    for layer in range(shape.num_layers, shape.num_layers + num_modules):
        module = {
            "enorm.weight": Spec((hidden,)),
            "hnorm.weight": Spec((hidden,)),
            "eh_proj.weight": Spec((hidden, 2 * hidden)),
            "input_layernorm.weight": Spec((hidden,)),
            "self_attn.q_proj.weight": Spec((queries, hidden)),
            "self_attn.k_proj.weight": Spec((keys, hidden)),
            "self_attn.v_proj.weight": Spec((keys, hidden)),
            "self_attn.o_proj.weight": Spec((hidden, queries)),
            "post_attention_layernorm.weight": Spec((hidden,)),
            "mlp.gate_proj.weight": Spec((intermediate_size, hidden)),
            "mlp.up_proj.weight": Spec((intermediate_size, hidden)),
            "mlp.down_proj.weight": Spec((hidden, intermediate_size)),
            "shared_head.norm.weight": Spec((hidden,)),
            "embed_tokens.weight": Spec((shape.vocab_size, hidden), optional=True),
            "shared_head.head.weight": Spec((shape.vocab_size, hidden), optional=True),
        }
        expected |= {f"model.layers.{layer}.{name}": spec for name, spec in module.items()}
    return expected


def mtp_config(
    shape: TargetShape, num_modules: int, intermediate_size: int, dtype: torch.dtype, first_hidden: str
) -> dict[str, Any]:
    """config.json. `num_hidden_layers` is the target's: the modules' layer numbers count on from it."""
    return {
        "architectures": ["LlamaMtpModel"],
        "model_type": "llama",
        "num_nextn_predict_layers": num_modules,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "shared_with_target": ["embed_tokens.weight", "shared_head.head.weight"],
        "mtp_first_hidden": first_hidden,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_ids[0] if shape.eos_token_ids else None,
        "pad_token_id": shape.pad_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
