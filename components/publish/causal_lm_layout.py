"""A draft model as an ordinary Llama with the target's tokenizer: what every engine calls a draft model.

`model.*` and `lm_head.weight`, config.json of LlamaForCausalLM, and the target's tokenizer files beside it: engines
compare the two vocabularies, so the LM head has a row for every token of the target (layout.whole_vocabulary).

Our loop never shows a drafter the first token of a text; engines feed it all of it. Drafts may differ by that token's
share of the attention; outputs cannot. That is the whole difference: with the token in its cache our draft model drafts
what vLLM's does, round for round (benchmarks/engine_cases.py, EngineCases.our_rounds).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from components.contract import UserError
from components.publish.eagle3_layout import check_architecture, dtype_of
from components.publish.exact_check import LaidOut, Spec
from components.publish.layout import AbstractLayout, OwnForm, Source, inner_size, whole_vocabulary, without_vocabulary
from components.publish.llama_block import (
    Fact,
    block_config,
    block_specs,
    check_block,
    check_facts,
    check_positions,
    head_dim_of,
)
from components.targets.model import TargetShape


@final
class CausalLmLayout(AbstractLayout):
    """See the module docstring."""

    format = "causal-lm"
    methods = ("draft-model",)
    with_tokenizer = True

    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """See AbstractLayout. Sizes are read off the tensors where the drafter is narrower than its target."""
        shape, settings = source.shape, own.settings
        if settings.get("model"):
            raise UserError(
                "causal-lm checkpoint: the draft model was given, not trained: serve it from where it is"
                f" ({settings['model']!r:.80})"
            )
        layers, hidden = int(settings.get("num_layers", 2)), int(settings.get("hidden_size") or shape.hidden_size)
        block = block_config(shape, intermediate_size=inner_size(own, shape), num_layers=layers, dtype=dtype_of(own))
        if hidden != shape.hidden_size:
            block |= {"hidden_size": hidden, **_narrower(own, shape)}
        tensors = without_vocabulary(own.tensors)
        if "lm_head.weight" in tensors:
            head = whole_vocabulary(tensors["lm_head.weight"], own.tensors.get("d2t"), shape.vocab_size)
            tensors["lm_head.weight"] = head
        return LaidOut({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **block}, tensors)

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """See AbstractLayout."""
        return "model.embed_tokens.weight" in names and "model.norm.weight" in names

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """See AbstractLayout."""
        check_architecture(config, ("LlamaForCausalLM",), where)
        check_facts(config, {"model_type": Fact(str, only=("llama",))}, where)
        check_block(config, where)

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """See AbstractLayout."""
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        specs = {"model.embed_tokens.weight": Spec((vocab_size, hidden)), "model.norm.weight": Spec((hidden,))}
        for layer in range(config["num_hidden_layers"]):
            specs |= block_specs(config, f"model.layers.{layer}.")
        # Tied, engines use the embedding, whatever lm_head a file has.
        return specs if config.get("tie_word_embeddings") else specs | {"lm_head.weight": Spec((vocab_size, hidden))}

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """See AbstractLayout. A draft model may have its own width, its own heads and its own rotary base."""
        check_positions(config, shape, where)

    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """See AbstractLayout."""
        config, shape = laid_out.config, source.shape
        if (head_dim_of(config), config["rope_theta"], config["rms_norm_eps"]) != (
            shape.head_dim,
            shape.rope_theta,
            shape.rms_norm_eps,
        ):
            raise UserError("causal-lm: Draftsmith's draft models have the target's head size, rotary base and epsilon")
        settings = {"num_layers": config["num_hidden_layers"], "intermediate_size": config["intermediate_size"]}
        if config["hidden_size"] != shape.hidden_size:
            settings["hidden_size"] = config["hidden_size"]
        tensors = dict(laid_out.tensors)
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        return OwnForm("draft-model", settings, tensors)


def _narrower(own: OwnForm, shape: TargetShape) -> dict[str, int]:
    """Heads and MLP width of a drafter that is narrower than its target, from its first layer."""
    at = "model.layers.0."
    sizes = {
        "num_attention_heads": (f"{at}self_attn.q_proj.weight", shape.head_dim),
        "num_key_value_heads": (f"{at}self_attn.k_proj.weight", shape.head_dim),
        "intermediate_size": (f"{at}mlp.up_proj.weight", 1),
    }
    return {size: own.tensors[name].shape[0] // unit for size, (name, unit) in sizes.items() if name in own.tensors}
