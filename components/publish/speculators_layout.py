"""The layout of the speculators library (0.9), which vLLM and llama.cpp's converter read as well: EAGLE-3 and P-EAGLE.

The Llama fields stand in `transformer_layer_config`, what the drafter adds beside it, and `speculators_config` says the
algorithm, how many tokens to propose and for which verifier. Layers are `layers.{i}.*`. Every flag is written out: vLLM
takes norm_before_residual for on where speculators takes it for off. The tapped layers are named, since all who read
this layout mean hidden_states[i] by i.

A copy of the target's embedding goes along: without one, speculators decodes with a random embedding and says nothing
(vLLM takes the target's, and does so as well where the copy is equal). P-EAGLE's mask token is a row of it, in place of
a token that no drafter ever reads: padding, or the first token of a text (column t reads x_{t+1}).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from components.contract import UserError
from components.publish.eagle3_layout import (
    NUM_TAPS,
    TAPS,
    check_architecture,
    check_cut,
    check_eagle3,
    check_embedding,
    check_taps,
    cut_vocabulary,
    drafted_tokens,
    dtype_of,
    eagle3_flags,
    eagle3_specs,
)
from components.publish.exact_check import LaidOut, Spec
from components.publish.layout import AbstractLayout, OwnForm, Source, inner_size, renamed
from components.publish.llama_block import (
    COUNT,
    Fact,
    block_config,
    block_specs,
    check_block,
    check_facts,
    check_positions,
    check_width,
)
from components.targets.model import TargetShape

VERSION = "0.9.0"
TYPES = {"eagle3": "eagle3", "p-eagle": "peagle"}
ARCHITECTURES = {"eagle3": ("Eagle3DraftModel", "Eagle3Speculator"), "peagle": ("PEagleDraftModel", "PEagleSpeculator")}
LAYER = "transformer_layer_config"


@final
class SpeculatorsLayout(AbstractLayout):
    """See the module docstring."""

    format = "speculators"
    methods = ("eagle3", "p-eagle")

    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """See AbstractLayout."""
        shape, kind = source.shape, TYPES[own.method]
        num_layers = int(own.settings.get("num_layers", 1)) if kind == "peagle" else 1
        inner = inner_size(own, shape)
        block = block_config(shape, intermediate_size=inner, num_layers=num_layers, dtype=dtype_of(own))
        depth = own.settings.get("parallel_depth" if kind == "peagle" else "ttt_steps", 3)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[kind][0]],
            "speculators_model_type": kind,
            "speculators_version": VERSION,
            "draft_vocab_size": drafted_tokens(own, shape.vocab_size),
            "target_hidden_size": shape.hidden_size,
            TAPS: list(shape.tap_layers),
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": bool(own.settings.get("fc_norm")),
            "norm_output": bool(own.settings.get("norm_output")),
            "embed_requires_grad": kind == "peagle",
            LAYER: {
                "model_type": "llama",
                **block,
                "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
            },
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": int(depth),
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                # speculators opens what stands here whenever it loads the drafter (vLLM does not): a hub id goes out,
                # the path of a private target does not; write it in where speculators is to load such a drafter.
                "verifier": {
                    "name_or_path": source.name.partition("@")[0] if "/" in source.name else None,
                    "architectures": [shape.architecture],
                },
            },
            "torch_dtype": block["torch_dtype"],
        }
        tensors = renamed(cut_vocabulary(own.tensors, shape.vocab_size), "midlayer.", "layers.0.")
        tensors["embed_tokens.weight"] = embedding = source.embedding().to(dtype_of(own)).clone()
        if kind == "peagle":
            config["mask_token_id"] = spare = _spare_token(shape)
            mask = tensors.pop("mask_token", None)
            if mask is not None:
                embedding[spare] = mask
            if "mask_hidden" in tensors:
                tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        return LaidOut(config, tensors)

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """See AbstractLayout."""
        return "speculators_model_type" in config or "speculators_config" in config

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """See AbstractLayout."""
        check_facts(config, {"speculators_model_type": Fact(str, only=tuple(TYPES.values()))}, where)
        kind = str(config["speculators_model_type"])
        check_architecture(config, ARCHITECTURES[kind], where)
        block = config.get(LAYER)
        if not isinstance(block, dict):
            raise UserError(f"{where}/config.json: {LAYER} is missing, or no mapping; it holds the Llama fields")
        check_facts(block, {"model_type": Fact(str, only=("llama",))}, where)
        check_block(block, where)
        if block.get("tie_word_embeddings"):
            raise UserError(
                f"{where}/config.json: tie_word_embeddings is true: engines would use no lm_head; say false"
            )
        if kind == "eagle3" and block["num_hidden_layers"] != 1:
            raise UserError(
                f"{where}/config.json: num_hidden_layers is {block['num_hidden_layers']}, must be 1 for eagle3"
            )
        check_eagle3({**config, "vocab_size": block["vocab_size"]}, where)
        check_facts(config, {"norm_before_residual": Fact(bool)}, where)
        if kind == "peagle":
            check_facts(config, {"mask_token_id": Fact(int, least=0)}, where)
            if config["mask_token_id"] >= block["vocab_size"]:
                raise UserError(f"{where}/config.json: mask_token_id {config['mask_token_id']} is no token")
        _check_proposals(config, kind, where)

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """See AbstractLayout."""
        block = config[LAYER]
        specs = eagle3_specs(config, block, "layers.0.")
        for layer in range(1, block["num_hidden_layers"]):
            specs |= block_specs(block, f"layers.{layer}.")
        if config["speculators_model_type"] == "peagle":
            width = NUM_TAPS * int(config.get("target_hidden_size") or block["hidden_size"])
            specs["mask_hidden"] = Spec((1, 1, width))
            specs["embed_tokens.weight"] = specs["embed_tokens.weight"]._replace(optional=False)
        return specs

    def check_values(self, laid_out: LaidOut, where: str) -> None:
        """See AbstractLayout."""
        check_cut(laid_out, where)
        check_embedding(laid_out, laid_out.config[LAYER], where)

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """See AbstractLayout."""
        check_positions(config[LAYER], shape, where)
        check_width({**config[LAYER], **config}, shape, where)
        check_taps(config, shape.num_layers, where)
        named = config["speculators_config"]["verifier"]["architectures"]
        if named and shape.architecture not in named:
            raise UserError(
                f"{where}/config.json: its verifier is {named[0]}, the target is {shape.architecture}:"
                " it was made for another target"
            )

    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """See AbstractLayout."""
        config, block = laid_out.config, laid_out.config[LAYER]
        tensors = dict(laid_out.tensors)
        embedding = tensors.pop("embed_tokens.weight", None)
        settings: dict[str, Any] = {"intermediate_size": block["intermediate_size"]}
        flags = eagle3_flags(config, self.format)
        depth = int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
        if config["speculators_model_type"] == "eagle3":
            settings |= {"ttt_steps": depth, **flags}
            return OwnForm("eagle3", settings, renamed(tensors, "layers.0.", "midlayer."))
        if any(flags.values()):
            raise UserError(f"{self.format}: Draftsmith's P-EAGLE network has neither fc_norm nor norm_output")
        assert embedding is not None
        settings |= {"parallel_depth": depth, "num_layers": block["num_hidden_layers"]}
        tensors["mask_token"] = embedding[config["mask_token_id"]].clone()
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
        return OwnForm("p-eagle", settings, tensors)


def _spare_token(shape: TargetShape) -> int:
    """A token whose embedding no drafter reads; raises UserError where the target has none."""
    taken = set(shape.eos_token_ids)
    for token in (shape.pad_token_id, shape.bos_token_id):
        if token is not None and token not in taken:
            return token
    raise UserError(
        "speculators checkpoint: P-EAGLE's mask needs a token of its own, and the target names no padding or first"
        " token that is not its end token; name one in the target's config.json (pad_token_id)"
    )


def _check_proposals(config: Mapping[str, Any], kind: str, where: str) -> None:
    """What vLLM and speculators read of speculators_config; raises UserError, one line."""
    told = config.get("speculators_config")
    at = f"{where}/config.json"
    if not isinstance(told, dict) or told.get("algorithm") != kind:
        raise UserError(f"{at}: speculators_config.algorithm must be {kind!r}, as speculators_model_type says")
    methods = told.get("proposal_methods")
    if not isinstance(methods, list) or not all(isinstance(one, dict) for one in methods):
        raise UserError(f"{at}: speculators_config.proposal_methods must be a list of mappings")
    if not methods or told.get("default_proposal_method") not in [one.get("proposal_type") for one in methods]:
        raise UserError(f"{at}: speculators_config must name a default_proposal_method among its proposal_methods")
    check_facts(methods[0], {"speculative_tokens": COUNT}, where)
    verifier = told.get("verifier")
    if not isinstance(verifier, dict) or "name_or_path" not in verifier:
        raise UserError(f"{at}: speculators_config.verifier must name the target (name_or_path, architectures)")
    if not isinstance(verifier.get("architectures"), list):
        raise UserError(f"{at}: speculators_config.verifier.architectures must be a list")
