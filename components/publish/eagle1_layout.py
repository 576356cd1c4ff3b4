"""The first EAGLE's checkpoint, for EAGLE-1 (EAGLE-2 is the same weights) and HASS, as vLLM and SGLang load it.

`fc.{weight,bias}`, `layers.0.*` without input_layernorm; embedding and LM head are the target's and are not repeated.
Our network scales embeddings to the size of the features before fc; no engine knows of that, so fc's first half is
multiplied by the scale here.

Three traps. vLLM's fc has no bias and its loader passes over `fc.bias` without a word (profiles.py refuses what was
trained with one); SGLang's has one, and leaves it random where the file has none: zeros are written then. A
`bias: true` in the config, as the first release has it for fc, makes vLLM and SGLang give every attention projection a
bias that no file fills, so it is never written. Both engines find their class in `architectures`: SGLang the first
name, vLLM the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from components.contract import UserError
from components.drafts.eagle1 import token_scale_of
from components.publish.eagle3_layout import check_architecture, dtype_of
from components.publish.exact_check import LaidOut, Spec
from components.publish.layout import AbstractLayout, OwnForm, Source, inner_size, without_vocabulary
from components.publish.llama_block import (
    IS_LLAMA,
    block_config,
    block_specs,
    check_block,
    check_facts,
    check_positions,
    check_width,
)
from components.targets.model import TargetShape

ARCHITECTURES = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM")


@final
class Eagle1Layout(AbstractLayout):
    """See the module docstring."""

    format = "eagle1"
    methods = ("eagle1", "hass")
    shares_head = True

    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """See AbstractLayout."""
        shape = source.shape
        inner = inner_size(own, shape)
        config = {
            "architectures": list(ARCHITECTURES),
            "model_type": "llama",
            **block_config(shape, intermediate_size=inner, num_layers=1, dtype=dtype_of(own)),
        }
        tensors = without_vocabulary(own.tensors)
        fuse = tensors.get("fc.weight")
        if fuse is not None and fuse.is_floating_point():
            fuse = fuse.clone()
            fuse[:, : shape.hidden_size] *= token_scale_of(source.opened())
            tensors["fc.weight"] = fuse
            if not own.settings.get("fc_bias", True):
                tensors["fc.bias"] = fuse.new_zeros(fuse.shape[0])
        return LaidOut(config, tensors)

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """See AbstractLayout."""
        return "fc.weight" in names and "d2t" not in names and "Eagle3" not in str(config.get("architectures"))

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """See AbstractLayout."""
        check_architecture(config, (*ARCHITECTURES, "LlamaForCausalLM"), where)
        check_facts(config, IS_LLAMA, where)
        check_block(config, where)
        if config["num_hidden_layers"] != 1:
            raise UserError(f"{where}/config.json: num_hidden_layers is {config['num_hidden_layers']}, must be 1")

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """See AbstractLayout."""
        hidden = int(config["hidden_size"])
        return {
            "fc.weight": Spec((hidden, 2 * hidden)),
            "fc.bias": Spec((hidden,)),
            **block_specs(config, "layers.0.", input_norm=False),
            "embed_tokens.weight": Spec((int(config["vocab_size"]), hidden), optional=True),
        }

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """See AbstractLayout."""
        check_positions(config, shape, where)
        check_width(config, shape, where)

    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """See AbstractLayout."""
        config, tensors = laid_out.config, dict(laid_out.tensors)
        tensors.pop("embed_tokens.weight", None)
        fuse = tensors["fc.weight"].clone()
        fuse[:, : config["hidden_size"]] /= token_scale_of(source.opened())
        settings = {
            "intermediate_size": config["intermediate_size"],
            "fc_bias": bool(tensors["fc.bias"].count_nonzero()),
        }
        if not settings["fc_bias"]:
            del tensors["fc.bias"]
        return OwnForm("eagle1", settings, {**tensors, "fc.weight": fuse})
