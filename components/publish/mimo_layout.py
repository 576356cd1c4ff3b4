"""One new MTP module in the shape of MiMo-7B's, which vLLM serves beside any dense target of the same block sizes
and unscaled RoPE.

MiMo's module is our MTP module under other names: token_layernorm, hidden_layernorm, input_proj (HIDDEN STATE first, so
the halves of our projection are swapped), a Qwen2 block (a Llama block with biases on q, k and v: zeros here) and
final_layernorm; both zero the embedding of position 0. vLLM feeds the module the target's last state after the final
norm, and drafts every further token with the same module, fed its own normed output. A module trained for the first
draft token only is therefore served exactly at depth 1, and less well deeper. vLLM's loader requires every tensor of
the class, so copies of the target's embedding and LM head are written too.

vLLM does not read this folder's config.json for the module: heads, MLP width, norm epsilon and rotary base come from
the target's config, and so does the number of modules, which is overridden by `--hf-overrides` (launch.py). Sizes are
therefore compared with the target's. A target with scaled RoPE is refused: vLLM would scale the module's positions as
well, and it was trained without scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from components.contract import UserError
from components.publish.eagle3_layout import check_architecture, dtype_of
from components.publish.exact_check import Checkpoint, Spec
from components.publish.layout import AbstractLayout, DrafterState, Source, inner_size, without_vocabulary
from components.publish.llama_block import (
    Fact,
    block_config,
    block_specs,
    check_block,
    check_facts,
    check_positions,
    check_width,
    head_dim_of,
)
from components.publish.mtp_layout import check_numbering, check_omitted_vocabulary
from components.targets.model import TargetShape

PREFIX = "model.mtp_layers.0."
NAMES = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@final
class MimoLayout(AbstractLayout):
    """One MTP module under the names of MiMo-7B, which vLLM serves."""

    format = "mimo"
    methods = ("mtp",)
    shares_head = True

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape, settings, dtype = source.shape, drafter.settings, dtype_of(drafter)
        if (modules := int(settings.get("mtp_modules", 3))) != 1:
            raise UserError(f"mimo checkpoint: holds one module, the drafter has {modules}; train with mtp_modules: 1")
        if settings.get("first_hidden", "post_norm") != "post_norm":
            raise UserError("mimo checkpoint: read after the final norm; train with first_hidden: post_norm")
        check_omitted_vocabulary(drafter, shape.vocab_size, "mimo checkpoint")
        config = {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            **block_config(
                shape, intermediate_size=inner_size(drafter, shape), num_layers=shape.num_layers, dtype=dtype
            ),
            "num_nextn_predict_layers": 1,
            "use_sliding_window": False,
        }
        layer_prefix = f"model.layers.{shape.num_layers}."
        tensors: dict[str, Tensor] = {}
        for name, tensor in without_vocabulary(drafter.tensors).items():
            inside = name.removeprefix(layer_prefix)
            tensors[PREFIX + NAMES.get(inside, inside) if name.startswith(layer_prefix) else name] = tensor
        joined = tensors.get(f"{PREFIX}input_proj.weight")
        if joined is not None:
            tensors[f"{PREFIX}input_proj.weight"] = _swap_halves(joined)
        for part in "qkv":
            weight = tensors.get(f"{PREFIX}self_attn.{part}_proj.weight")
            if weight is not None:
                tensors[f"{PREFIX}self_attn.{part}_proj.bias"] = torch.zeros(weight.shape[0], dtype=dtype)
        shared = zip(SHARED, (source.embedding(), source.head()), strict=True)
        return Checkpoint(config, tensors | {name: tensor.to(dtype).clone() for name, tensor in shared})

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        return "MiMo" in str(config.get("architectures")) or any(name.startswith(PREFIX) for name in names)

    def check_config(self, config: Mapping[str, Any], location: str) -> None:
        check_architecture(config, ("MiMoForCausalLM",), location)
        check_facts(config, {"model_type": Fact(str, only=("qwen2", "mimo"))}, location)
        check_block(config, location)
        check_facts(config, {"num_nextn_predict_layers": Fact(int, only=(1,))}, location)
        if head_dim_of(config) * config["num_attention_heads"] != config["hidden_size"]:
            raise UserError(
                f"{location}/config.json: {config['num_attention_heads']} heads of {head_dim_of(config)} are not"
                f" hidden_size {config['hidden_size']}, and vLLM's Qwen2 block takes their size from it"
            )

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        widths = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        widths["v"] = widths["k"]
        return {
            f"{PREFIX}token_layernorm.weight": Spec((hidden,)),
            f"{PREFIX}hidden_layernorm.weight": Spec((hidden,)),
            f"{PREFIX}input_proj.weight": Spec((hidden, 2 * hidden)),
            **block_specs(config, PREFIX),
            **{f"{PREFIX}self_attn.{part}_proj.bias": Spec((n * head_dim_of(config),)) for part, n in widths.items()},
            f"{PREFIX}final_layernorm.weight": Spec((hidden,)),
            **{name: Spec((vocab_size, hidden)) for name in SHARED},
        }

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, location: str) -> None:
        check_positions(config, shape, location)
        check_width(config, shape, location)
        check_numbering(config, shape, location)
        if shape.rope_scaling:
            raise UserError(
                f"{location}: the target's RoPE is scaled ({shape.rope_scaling}), by which vLLM would rotate a module"
                " that was trained with plain positions; take another format, or a target whose RoPE is not scaled"
            )
        for name in ("intermediate_size", "rms_norm_eps"):
            if config[name] != getattr(shape, name):
                raise UserError(
                    f"{location}/config.json: {name} is {config[name]}, must be the target's {getattr(shape, name)}:"
                    " vLLM builds the module by the target's config"
                )

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        native_names = {after: before for before, after in NAMES.items()}
        tensors: dict[str, Tensor] = {}
        for name, tensor in checkpoint.tensors.items():
            if name in SHARED:
                continue
            if name.endswith("_proj.bias"):
                if bool(tensor.count_nonzero()):
                    raise UserError(f"mimo: {name} is not zero, and Draftsmith's block has no biases")
                continue
            inside = name.removeprefix(PREFIX)
            tensors[f"model.layers.{source.shape.num_layers}.{native_names.get(inside, inside)}"] = tensor
        joined = f"model.layers.{source.shape.num_layers}.eh_proj.weight"
        tensors[joined] = _swap_halves(tensors[joined])
        settings = {"mtp_modules": 1, "intermediate_size": checkpoint.config["intermediate_size"]}
        return DrafterState("mtp", settings, tensors)


def _swap_halves(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, 1)[::-1], 1)
