"""DFlash and DSpark in the layout of the speculators library (0.9).

As in speculators.py the block's fields are in `transformer_layer_config`, whose kind is Qwen3's. Beside it stand the
width of the block, the mask token, whether the newest token's own row drafts, the tapped layers (inputs of layers, so
that id i is hidden_states[i]) and DSpark's two heads. The embedding and the LM head are written too, copies of the
target's: speculators would decode with random ones.

sliding_window_non_causal is always true: speculators reads it for layers with a window alone, but vLLM 0.32.0 lets no
row of a DFlash block see a later one where it is false, whatever the layer.
"""

from __future__ import annotations

from typing import Any, final

import torch

from components.contract import UserError
from components.drafts.settings import causal_block_fault, read_window
from components.outside_json import JsonObject
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.eagle3 import check_vocabulary_pair, draft_vocab_size, drop_whole_vocabulary
from components.publish.formats.interface import AbstractLayout, DrafterState, Source, own_embedding, settings_of
from components.publish.formats.llama_block import (
    COUNT,
    Fact,
    block_config,
    block_specs,
    check_architecture,
    check_block,
    check_facts,
    check_positions,
    check_width,
    dtype_of,
    own_block,
    window_fields,
)
from components.publish.formats.speculators import LAYER, VERSION, check_proposals, check_verifier, proposals_of
from components.targets.shape import TargetShape, tap_layers_fault

ARCHITECTURES = {"dflash": ("DFlashDraftModel", "DFlashSpeculator"), "dspark": ("DSparkDraftModel", "DSparkSpeculator")}
TAPS = "aux_hidden_state_layer_ids"
FACTS: dict[str, Fact] = {
    "draft_vocab_size": COUNT,
    "block_size": Fact(int, least=2, most=17),
    "mask_token_id": Fact(int, least=0),
    "sample_from_anchor": Fact(bool),
    "sliding_window_non_causal": Fact(bool, optional=True),
}
HEAD_FACTS: dict[str, Fact] = {
    "markov_rank": COUNT,
    "markov_head_type": Fact(str, only=("vanilla",)),
    "enable_confidence_head": Fact(bool, only=(True,)),
    "confidence_head_with_markov": Fact(bool, only=(True,)),
}


@final
class DFlashLayout(AbstractLayout):
    """See the module docstring."""

    format = "dflash"
    methods = ("dflash", "dspark")

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape, settings = source.shape, settings_of(drafter)
        refuse_other_block(settings, self.format)
        block, scaling = block_config(drafter, shape, settings.num_layers), settings.rope_scaling or {}
        config: JsonObject = {
            "architectures": [ARCHITECTURES[drafter.method][0]],
            "speculators_model_type": drafter.method,
            "speculators_version": VERSION,
            "draft_vocab_size": draft_vocab_size(drafter, shape.vocab_size),
            "target_hidden_size": shape.hidden_size,
            TAPS: list(drafter.tap_layers or shape.tap_layers),
            "block_size": settings.block_size,
            "mask_token_id": mask_token_of(settings, shape),
            "sample_from_anchor": settings.sample_from_anchor,
            "sliding_window_non_causal": True,
            LAYER: {
                "model_type": "qwen3",
                **block,
                "layer_types": ["full_attention"] * settings.num_layers,
                **window_fields(drafter, settings.num_layers),
                "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": block["rope_theta"]},
            },
            "speculators_config": proposals_of(drafter.method, settings.num_draft_tokens, source),
            "torch_dtype": block["torch_dtype"],
        }
        config |= head_fields(drafter, settings)
        tensors, head = drop_whole_vocabulary(drafter.tensors, shape.vocab_size), source.head()
        if "d2t" in tensors:
            head = head[tensors["d2t"] + torch.arange(len(tensors["d2t"]))]
        tensors["lm_head.weight"] = head.to(dtype_of(drafter)).clone()
        tensors.setdefault("embed_tokens.weight", source.embedding().to(dtype_of(drafter)).clone())
        return Checkpoint(config, tensors)

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return config.get("speculators_model_type") in self.methods

    def check_config(self, config: Config, location: str) -> None:
        check_facts(config, {"speculators_model_type": Fact(str, only=self.methods)}, location)
        kind = str(config["speculators_model_type"])
        check_architecture(config, ARCHITECTURES[kind], location)
        block, at = config.get(LAYER), f"{location}/config.json"
        if not isinstance(block, dict):
            raise UserError(f"{at}: {LAYER} is missing, or no mapping; it holds the block's fields")
        check_facts(block, {"model_type": Fact(str, only=("qwen3",))}, location)
        check_block(block, location)
        window, fault = read_window(block)
        if fault := fault or (causal_block_fault(config) if window else ""):
            raise UserError(f"{at}: {fault}")
        check_facts(config, FACTS | (HEAD_FACTS if kind == "dspark" else {}), location)
        for name, size in (("mask_token_id", block["vocab_size"]), ("draft_vocab_size", block["vocab_size"] + 1)):
            if config[name] >= size:
                raise UserError(f"{at}: {name} is {config[name]}, the vocabulary has {block['vocab_size']} tokens")
        ids = config.get(TAPS)
        if not isinstance(ids, list) or not all(type(one) is int for one in ids) or tap_layers_fault(ids):
            raise UserError(f"{at}: {TAPS} is {ids!r:.60}, must be ascending layer numbers")
        check_proposals(config, kind, location)
        drafted, stated = _num_draft_tokens(config), config["speculators_config"]["proposal_methods"][0]
        if stated["speculative_tokens"] != drafted:
            raise UserError(f"{at}: speculative_tokens is {stated['speculative_tokens']}, a block drafts {drafted}")

    def expected(self, config: Config) -> dict[str, Spec]:
        block, drafted = config[LAYER], int(config["draft_vocab_size"])
        hidden, size = int(block["hidden_size"]), int(block["vocab_size"])
        rank = int(config["markov_rank"]) if config["speculators_model_type"] == "dspark" else 0
        return network_specs(block, len(config[TAPS]), drafted, rank) | {
            "lm_head.weight": Spec((drafted, hidden)),
            "embed_tokens.weight": Spec((size, hidden)),
            "d2t": Spec((drafted,), torch.int64, optional=drafted == size),
            "t2d": Spec((size,), torch.bool, optional=drafted == size),
        }

    def check_values(self, checkpoint: Checkpoint, location: str) -> None:
        check_vocabulary_pair(checkpoint, location)

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        check_positions(config[LAYER], shape, location)
        check_width({**config[LAYER], **config}, shape, location)
        if config[TAPS][-1] >= shape.num_layers:
            raise UserError(
                f"{location}/config.json: {TAPS} is {config[TAPS]}, the target has {shape.num_layers} layers"
            )
        check_verifier(config, shape, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config, block, tensors = checkpoint.config, checkpoint.config[LAYER], dict(checkpoint.tensors)
        del tensors["lm_head.weight"]
        kind = str(config["speculators_model_type"])
        settings = read_settings(kind, config, block) | {"sample_from_anchor": config["sample_from_anchor"]}
        settings |= own_block(block, source.shape, self.format) | own_embedding(tensors, source)
        return DrafterState(kind, settings, tensors, tap_layers=tuple(config[TAPS]))


def _num_draft_tokens(config: Config) -> int:
    """Draft tokens of one block."""
    return int(config["block_size"]) - (not config["sample_from_anchor"])


def refuse_other_block(settings: Any, format: str) -> None:
    """Raise UserError for a drafter whose block is not Qwen3's."""
    if not settings.qk_norm:
        raise UserError(f"{format}: the format's block is Qwen3's, and this drafter was trained without qk_norm")


def mask_token_of(settings: Any, shape: TargetShape) -> int:
    """The token whose embedding masks."""
    return shape.vocab_size - 1 if settings.mask_token_id is None else int(settings.mask_token_id)


def head_fields(drafter: DrafterState, settings: Any) -> JsonObject:
    """The fields of DSpark's two heads; {} for DFlash."""
    if drafter.method != "dspark":
        return {}
    return {
        "markov_rank": settings.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def network_specs(block: Config, num_taps: int, drafted: int, markov_rank: int) -> dict[str, Spec]:
    """The tensors of the network itself. block: its Qwen3 fields; drafted: draft vocabulary; no rank: DFlash."""
    hidden, size = int(block["hidden_size"]), int(block["vocab_size"])
    specs = {
        "fc.weight": Spec((hidden, num_taps * hidden)),
        "hidden_norm.weight": Spec((hidden,)),
        "norm.weight": Spec((hidden,)),
    }
    for layer in range(block["num_hidden_layers"]):
        specs |= block_specs(block, f"layers.{layer}.")
    if markov_rank:
        specs |= {
            "markov_head.markov_w1.weight": Spec((size, markov_rank)),
            "markov_head.markov_w2.weight": Spec((drafted, markov_rank)),
            "confidence_head.proj.weight": Spec((1, hidden + markov_rank)),
            "confidence_head.proj.bias": Spec((1,)),
        }
    return specs


def read_settings(method: str, fields: Config, block: Config) -> JsonObject:
    """The settings that both layouts of DFlash and DSpark state under the same names."""
    names = ("block_size", "mask_token_id", *(("markov_rank",) if method == "dspark" else ()))
    settings: JsonObject = {name: fields[name] for name in names}
    return settings | {"intermediate_size": block["intermediate_size"], "num_layers": block["num_hidden_layers"]}
