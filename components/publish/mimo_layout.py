"""One new MTP module in the shape of MiMo-7B's, which vLLM serves beside any dense target of the same block sizes
and unscaled RoPE.

MiMo's module is ours in other words: token_layernorm, hidden_layernorm, input_proj (HIDDEN STATE first, so the halves
of our projection trade places), a Qwen2 block (a Llama block with biases on q, k and v: zeros here), final_layernorm;
the embedding of position 0 is zeroed in both. vLLM gives it the target's last state after the final norm, and uses the
module for every further guess as well, fed with its own normed output: a module trained for the first guess only is
served at depth 1 exactly, deeper at its own risk. vLLM's loader wants every tensor of the class, so copies of the
target's embedding and LM head go along.

vLLM reads nothing of this folder's config.json for the module: heads, MLP width, norm epsilon and rotary base are those
in the target's config, and so is the number of modules, which has to be told (`--hf-overrides`, see launch.py). Sizes
are therefore compared with the target's, and a target whose RoPE is scaled is refused: vLLM would rotate its module in
the scaled way, and it was trained in the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from components.contract import UserError
from components.publish.eagle3_layout import check_architecture, dtype_of
from components.publish.exact_check import LaidOut, Spec
from components.publish.layout import AbstractLayout, OwnForm, Source, inner_size, without_vocabulary
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
from components.publish.mtp_layout import check_cut, check_numbering
from components.targets.model import TargetShape

AT = "model.mtp_layers.0."
NAMES = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "eh_proj.weight": "input_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@final
class MimoLayout(AbstractLayout):
    """See the module docstring."""

    format = "mimo"
    methods = ("mtp",)
    shares_head = True

    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """See AbstractLayout."""
        shape, settings, dtype = source.shape, own.settings, dtype_of(own)
        if (modules := int(settings.get("mtp_modules", 3))) != 1:
            raise UserError(f"mimo checkpoint: holds one module, the drafter has {modules}; train with mtp_modules: 1")
        if settings.get("first_hidden", "post_norm") != "post_norm":
            raise UserError("mimo checkpoint: read after the final norm; train with first_hidden: post_norm")
        check_cut(own, shape.vocab_size, "mimo checkpoint")
        config = {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            **block_config(shape, intermediate_size=inner_size(own, shape), num_layers=shape.num_layers, dtype=dtype),
            "num_nextn_predict_layers": 1,
            "use_sliding_window": False,
        }
        ours = f"model.layers.{shape.num_layers}."
        tensors: dict[str, Tensor] = {}
        for name, tensor in without_vocabulary(own.tensors).items():
            inside = name.removeprefix(ours)
            tensors[AT + NAMES.get(inside, inside) if name.startswith(ours) else name] = tensor
        joined = tensors.get(f"{AT}input_proj.weight")
        if joined is not None:
            tensors[f"{AT}input_proj.weight"] = _halves_swapped(joined)
        for part in "qkv":
            weight = tensors.get(f"{AT}self_attn.{part}_proj.weight")
            if weight is not None:
                tensors[f"{AT}self_attn.{part}_proj.bias"] = torch.zeros(weight.shape[0], dtype=dtype)
        shared = zip(SHARED, (source.embedding(), source.head()), strict=True)
        return LaidOut(config, tensors | {name: tensor.to(dtype).clone() for name, tensor in shared})

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """See AbstractLayout."""
        return "MiMo" in str(config.get("architectures")) or any(name.startswith(AT) for name in names)

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """See AbstractLayout."""
        check_architecture(config, ("MiMoForCausalLM",), where)
        check_facts(config, {"model_type": Fact(str, only=("qwen2", "mimo"))}, where)
        check_block(config, where)
        check_facts(config, {"num_nextn_predict_layers": Fact(int, only=(1,))}, where)
        if head_dim_of(config) * config["num_attention_heads"] != config["hidden_size"]:
            raise UserError(
                f"{where}/config.json: {config['num_attention_heads']} heads of {head_dim_of(config)} are not"
                f" hidden_size {config['hidden_size']}, and vLLM's Qwen2 block takes their size from it"
            )

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """See AbstractLayout."""
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        widths = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        widths["v"] = widths["k"]
        return {
            f"{AT}token_layernorm.weight": Spec((hidden,)),
            f"{AT}hidden_layernorm.weight": Spec((hidden,)),
            f"{AT}input_proj.weight": Spec((hidden, 2 * hidden)),
            **block_specs(config, AT),
            **{f"{AT}self_attn.{part}_proj.bias": Spec((n * head_dim_of(config),)) for part, n in widths.items()},
            f"{AT}final_layernorm.weight": Spec((hidden,)),
            **{name: Spec((vocab_size, hidden)) for name in SHARED},
        }

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """See AbstractLayout."""
        check_positions(config, shape, where)
        check_width(config, shape, where)
        check_numbering(config, shape, where)
        if shape.rope_scaling:
            raise UserError(
                f"{where}: the target's RoPE is scaled ({shape.rope_scaling}), by which vLLM would rotate a module that"
                " was trained with plain positions; take another format, or a target whose RoPE is not scaled"
            )
        for name in ("intermediate_size", "rms_norm_eps"):
            if config[name] != getattr(shape, name):
                raise UserError(
                    f"{where}/config.json: {name} is {config[name]}, must be the target's {getattr(shape, name)}:"
                    " vLLM builds the module by the target's config"
                )

    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """See AbstractLayout."""
        theirs = {after: before for before, after in NAMES.items()}
        tensors: dict[str, Tensor] = {}
        for name, tensor in laid_out.tensors.items():
            if name in SHARED:
                continue
            if name.endswith("_proj.bias"):
                if bool(tensor.count_nonzero()):
                    raise UserError(f"mimo: {name} is not zero, and Draftsmith's block has no biases")
                continue
            inside = name.removeprefix(AT)
            tensors[f"model.layers.{source.shape.num_layers}.{theirs.get(inside, inside)}"] = tensor
        joined = f"model.layers.{source.shape.num_layers}.eh_proj.weight"
        tensors[joined] = _halves_swapped(tensors[joined])
        settings = {"mtp_modules": 1, "intermediate_size": laid_out.config["intermediate_size"]}
        return OwnForm("mtp", settings, tensors)


def _halves_swapped(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, 1)[::-1], 1)
