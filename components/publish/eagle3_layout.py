"""The EAGLE-3 checkpoint that llama.cpp, vLLM, SGLang, speculators and SpecForge load.

Names and config keys are those of the first public EAGLE-3 release (`midlayer.*`, `d2t` as offsets). Three traps decide
the config: `rope_theta` stands at top level (engines that look only there fall back to 10000); the positions are the
target's (`max_position_embeddings` 2048, as in the first release, collapses acceptance on longer texts); the tapped
layers are left out: every engine defaults to Hugging Face hidden_states[2, n//2, n-3], which is what we train on, while
explicit ids mean different layers in different engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from components.contract import UserError
from components.publish.exact_check import LaidOut, Spec, check_tensors
from components.targets.model import TargetShape


def lay_out(tensors: Mapping[str, Tensor], shape: TargetShape, record: Mapping[str, Any]) -> LaidOut:
    """Check an EAGLE-3 drafter's tensors against its target and give them their config.json.

    tensors: the drafter's state dict, in the names above.
    record: draft.json; it names the two sizes in which a drafter is free: draft vocabulary and MLP width.
    Raises UserError, one line, for anything an engine might load wrongly.
    """
    where = "eagle3 checkpoint"
    if newer := [name for name in ("fc_norm", "norm_output") if record["settings"].get(name)]:
        raise UserError(
            f"{where}: trained with {' and '.join(newer)} (EAGLE-3.1), which engines that load this layout drop without"
            " a word, all but the newest vLLM; train it without to publish it"
        )
    sizes = {
        "draft_vocab_size": int(record["draft_vocab_size"]),
        "intermediate_size": int(record["settings"].get("intermediate_size") or shape.intermediate_size),
    }
    check_tensors(tensors, expected_tensors(shape, **sizes), where)
    check_vocabulary(tensors["d2t"], tensors["t2d"], where)
    return LaidOut(eagle3_config(shape, dtype=tensors["fc.weight"].dtype, **sizes), dict(tensors))


def expected_tensors(shape: TargetShape, draft_vocab_size: int, intermediate_size: int) -> dict[str, Spec]:
    """Every tensor of the layout with its shape and dtype. The draft is as wide as its target."""
    hidden = shape.hidden_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    mid = "midlayer."
    return {
        "fc.weight": Spec((hidden, 3 * hidden)),
        f"{mid}input_layernorm.weight": Spec((hidden,)),
        f"{mid}hidden_norm.weight": Spec((hidden,)),
        f"{mid}post_attention_layernorm.weight": Spec((hidden,)),
        f"{mid}self_attn.q_proj.weight": Spec((queries, 2 * hidden)),
        f"{mid}self_attn.k_proj.weight": Spec((keys, 2 * hidden)),
        f"{mid}self_attn.v_proj.weight": Spec((keys, 2 * hidden)),
        f"{mid}self_attn.o_proj.weight": Spec((hidden, queries)),
        f"{mid}mlp.gate_proj.weight": Spec((intermediate_size, hidden)),
        f"{mid}mlp.up_proj.weight": Spec((intermediate_size, hidden)),
        f"{mid}mlp.down_proj.weight": Spec((hidden, intermediate_size)),
        "norm.weight": Spec((hidden,)),
        "lm_head.weight": Spec((draft_vocab_size, hidden)),
        "d2t": Spec((draft_vocab_size,), torch.int64),
        "t2d": Spec((shape.vocab_size,), torch.bool),
        # Engines share the target's embedding; a copy is allowed.
        "embed_tokens.weight": Spec((shape.vocab_size, hidden), optional=True),
    }


def check_vocabulary(d2t: Tensor, t2d: Tensor, where: str) -> None:
    """d2t holds offsets (target id = i + d2t[i]), ids ascend inside the target's vocabulary, t2d marks the same ids."""
    ids = d2t + torch.arange(d2t.numel())
    vocab_size = t2d.numel()
    ascending = bool((ids.diff() > 0).all())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not (ascending and inside):
        absolute = bool((d2t.diff() > 0).all()) and bool(((d2t >= 0) & (d2t < vocab_size)).all())
        same = absolute and torch.equal(t2d.nonzero().flatten(), d2t)
        if same:
            raise UserError(f"{where}: d2t holds target ids, must hold offsets (target id - draft id)")
        what = "leave the target's vocabulary" if not inside else "do not ascend"
        raise UserError(f"{where}: d2t is wrong: the target ids i + d2t[i] {what} (0..{vocab_size - 1})")
    if not torch.equal(t2d.nonzero().flatten(), ids):
        absolute = torch.equal(t2d.nonzero().flatten(), d2t)
        hint = "d2t holds target ids, must hold offsets" if absolute else "one of the two was changed alone"
        raise UserError(f"{where}: t2d and d2t name different tokens; {hint}")


def eagle3_config(
    shape: TargetShape, draft_vocab_size: int, intermediate_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_ids[0] if shape.eos_token_ids else None,
        "pad_token_id": shape.pad_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
