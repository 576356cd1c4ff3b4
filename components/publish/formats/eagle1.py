"""The first EAGLE's checkpoint, for EAGLE-1 (EAGLE-2 is the same weights) and HASS, as vLLM and SGLang load it.

Tensors are `fc.{weight,bias}` and `layers.0.*` without input_layernorm; embedding and LM head are the target's and are
not repeated. Our network scales embeddings to the size of the features before fc. Engines do not, so fc's first half
is multiplied by the scale here.

Three traps:
  - vLLM's fc has no bias, and its loader ignores `fc.bias` silently: profiles.py refuses drafters trained with one.
    SGLang's fc has a bias and leaves it random where the file has none: zeros are written then.
  - `bias: true` in the config, as in the first release, makes both engines give every attention projection a bias that
    no file fills, so it is never written.
  - Both engines find their class in `architectures`: SGLang takes the first name, vLLM the second.
"""

from __future__ import annotations

from typing import final

from components.contract import UserError
from components.drafts.methods.eagle1 import token_scale_of
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.interface import DrafterState, Source, own_embedding, settings_of, without_vocabulary
from components.publish.formats.llama_block import (
    AbstractLlamaLayout,
    block_config,
    block_specs,
    own_block,
    refuse_qk_norm,
    scaling_field,
)


@final
class Eagle1Layout(AbstractLlamaLayout):
    """EAGLE-1 and HASS under the names of the first EAGLE release: `fc.*` and `layers.0.*`."""

    format = "eagle1"
    methods = ("eagle1", "hass")
    architectures = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "LlamaForCausalLM")
    shares_head = True

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape = source.shape
        refuse_qk_norm(drafter, self.format)
        config = {
            **self.names(),
            "architectures": [*self.architectures[:2]],
            **block_config(drafter, shape),
            **scaling_field(drafter),
        }
        tensors = without_vocabulary(drafter.tensors)
        fuse = tensors.get("fc.weight")
        if fuse is not None and fuse.is_floating_point():
            fuse = fuse.clone()
            fuse[:, : shape.hidden_size] *= token_scale_of(source.loaded_target())
            tensors["fc.weight"] = fuse
            if not settings_of(drafter).fc_bias:
                tensors["fc.bias"] = fuse.new_zeros(fuse.shape[0])
        return Checkpoint(config, tensors)

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return "fc.weight" in names and "d2t" not in names and "Eagle3" not in str(config.get("architectures"))

    def check_config(self, config: Config, location: str) -> None:
        super().check_config(config, location)
        if config["num_hidden_layers"] != 1:
            raise UserError(f"{location}/config.json: num_hidden_layers is {config['num_hidden_layers']}, must be 1")

    def expected(self, config: Config) -> dict[str, Spec]:
        hidden = int(config["hidden_size"])
        return {
            "fc.weight": Spec((hidden, 2 * hidden)),
            "fc.bias": Spec((hidden,)),
            **block_specs(config, "layers.0.", input_norm=False),
            "embed_tokens.weight": Spec((int(config["vocab_size"]), hidden), optional=True),
        }

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config, tensors = checkpoint.config, dict(checkpoint.tensors)
        fuse = tensors["fc.weight"].clone()
        fuse[:, : config["hidden_size"]] /= token_scale_of(source.loaded_target())
        settings = {
            "intermediate_size": config["intermediate_size"],
            "fc_bias": bool(tensors["fc.bias"].count_nonzero()),
            **own_block(config, source.shape, self.format),
            **own_embedding(tensors, source),
        }
        if not settings["fc_bias"]:
            del tensors["fc.bias"]
        return DrafterState("eagle1", settings, {**tensors, "fc.weight": fuse})
