"""A draft model as an ordinary Llama with the target's tokenizer: what every engine calls a draft model.

Tensors are `model.*` and `lm_head.weight`, with the config.json of LlamaForCausalLM and the target's tokenizer files.
Engines compare the two vocabularies, so the LM head has a row for every token of the target (layout.whole_vocabulary).

Our loop never shows a drafter the first token of a text; engines do. Drafts may therefore differ by that token's share
of the attention; outputs cannot. There is no other difference: with that token in its cache, our draft model drafts the
same as vLLM's in every round (benchmarks/engine_cases.py, EngineCases.our_rounds).
"""

from __future__ import annotations

from typing import final

from components.contract import UserError
from components.drafts.settings import DraftModelSettings
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.interface import DrafterState, Source, whole_vocabulary, without_vocabulary
from components.publish.formats.llama_block import (
    AbstractLlamaLayout,
    block_config,
    block_specs,
    check_positions,
    head_dim_of,
)
from components.targets.shape import TargetShape


@final
class CausalLmLayout(AbstractLlamaLayout):
    """A draft model as a LlamaForCausalLM with the target's tokenizer files."""

    format = "causal-lm"
    methods = ("draft-model",)
    architectures = ("LlamaForCausalLM",)
    with_tokenizer = True

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        """Sizes are read off the tensors where the drafter is narrower than its target."""
        shape, settings = source.shape, DraftModelSettings.model_validate(drafter.settings)
        if settings.model:
            raise UserError(
                "causal-lm checkpoint: the draft model was given, not trained: serve it from where it is"
                f" ({settings.model!r:.80})"
            )
        layers, hidden = settings.num_layers, settings.hidden_size or shape.hidden_size
        block = block_config(drafter, shape, layers)
        if hidden != shape.hidden_size:
            block |= {"hidden_size": hidden, **_sizes_from_tensors(drafter, shape)}
        tensors = without_vocabulary(drafter.tensors)
        if "lm_head.weight" in tensors:
            head = whole_vocabulary(tensors["lm_head.weight"], drafter.tensors.get("d2t"), shape.vocab_size)
            tensors["lm_head.weight"] = head
        return Checkpoint({**self.names(), **block}, tensors)

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return "model.embed_tokens.weight" in names and "model.norm.weight" in names

    def expected(self, config: Config) -> dict[str, Spec]:
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        specs = {"model.embed_tokens.weight": Spec((vocab_size, hidden)), "model.norm.weight": Spec((hidden,))}
        for layer in range(config["num_hidden_layers"]):
            specs |= block_specs(config, f"model.layers.{layer}.")
        # Tied, engines use the embedding, whatever lm_head a file has.
        return specs if config.get("tie_word_embeddings") else specs | {"lm_head.weight": Spec((vocab_size, hidden))}

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        """A draft model may have its own width, its own heads and its own rotary base."""
        check_positions(config, shape, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config, shape = checkpoint.config, source.shape
        if (head_dim_of(config), config["rope_theta"], config["rms_norm_eps"]) != (
            shape.head_dim,
            shape.rope_theta,
            shape.rms_norm_eps,
        ):
            raise UserError("causal-lm: Draftsmith's draft models have the target's head size, rotary base and epsilon")
        settings = {"num_layers": config["num_hidden_layers"], "intermediate_size": config["intermediate_size"]}
        if config["hidden_size"] != shape.hidden_size:
            settings["hidden_size"] = config["hidden_size"]
        tensors = dict(checkpoint.tensors)
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
        return DrafterState("draft-model", settings, tensors)


def _sizes_from_tensors(drafter: DrafterState, shape: TargetShape) -> dict[str, int]:
    """Heads and MLP width of a drafter that is narrower than its target, read off the tensors of its first layer."""
    at = "model.layers.0."
    sizes = {
        "num_attention_heads": (f"{at}self_attn.q_proj.weight", shape.head_dim),
        "num_key_value_heads": (f"{at}self_attn.k_proj.weight", shape.head_dim),
        "intermediate_size": (f"{at}mlp.up_proj.weight", 1),
    }
    return {
        size: drafter.tensors[name].shape[0] // unit for size, (name, unit) in sizes.items() if name in drafter.tensors
    }
