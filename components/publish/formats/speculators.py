"""The layout of the speculators library (0.9), which vLLM and llama.cpp's converter read as well: EAGLE-3 and P-EAGLE.

The Llama fields are in `transformer_layer_config`, the drafter's own fields beside it, and `speculators_config` names
the algorithm, the number of tokens to propose and the verifier. Layers are `layers.{i}.*`. Every flag is written,
because vLLM defaults norm_before_residual to on and speculators to off. The tapped layers are written too, because all
readers of this layout mean hidden_states[i] by i.

The drafter's embedding is included, a copy of the target's where it has none of its own: without one, speculators
silently decodes with a random embedding (vLLM uses the target's, also where the copy is equal). P-EAGLE's mask token
takes the row of a token that no drafter ever reads: padding, or the first token of a text (column t reads x_{t+1}).
"""

from __future__ import annotations

from typing import final

from components.contract import UserError
from components.engines.profiles import NORM_FLAGS
from components.outside_json import JsonObject
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.eagle3 import (
    TAPS,
    USUAL_TAPS,
    check_eagle3,
    check_embedding,
    check_taps,
    check_vocabulary_pair,
    draft_vocab_size,
    drop_whole_vocabulary,
    eagle3_flags,
    eagle3_specs,
    num_taps,
    tap_ids,
)
from components.publish.formats.interface import (
    AbstractLayout,
    DrafterState,
    Source,
    own_embedding,
    replace_prefix,
    settings_of,
)
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
from components.targets.shape import TargetShape

VERSION = "0.9.0"
TYPES = {"eagle3": "eagle3", "p-eagle": "peagle"}
ARCHITECTURES = {"eagle3": ("Eagle3DraftModel", "Eagle3Speculator"), "peagle": ("PEagleDraftModel", "PEagleSpeculator")}
LAYER = "transformer_layer_config"


@final
class SpeculatorsLayout(AbstractLayout):
    """EAGLE-3 and P-EAGLE in the layout of the speculators library."""

    format = "speculators"
    methods = ("eagle3", "p-eagle")

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape, kind = source.shape, TYPES[drafter.method]
        settings, parallel = settings_of(drafter), kind == "peagle"
        num_layers, depth = (settings.num_layers, settings.parallel_depth) if parallel else (1, settings.ttt_steps)
        block, scaling = block_config(drafter, shape, num_layers), settings.rope_scaling or {}
        taps = drafter.tap_layers or shape.tap_layers
        if len(taps) != USUAL_TAPS:
            block["num_aux_hidden_states"] = len(taps)  # vLLM takes three here unless this says otherwise
        config: JsonObject = {
            "architectures": [ARCHITECTURES[kind][0]],
            "speculators_model_type": kind,
            "speculators_version": VERSION,
            "draft_vocab_size": draft_vocab_size(drafter, shape.vocab_size),
            "target_hidden_size": shape.hidden_size,
            TAPS: list(taps),
            **{name: bool(drafter.settings.get(name)) for name in NORM_FLAGS},
            "embed_requires_grad": parallel,
            LAYER: {
                "model_type": "qwen3" if settings.qk_norm else "llama",
                **block,
                **window_fields(drafter, num_layers),
                "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": block["rope_theta"]},
            },
            "speculators_config": proposals_of(kind, depth, source),
            "torch_dtype": block["torch_dtype"],
        }
        tensors = replace_prefix(drop_whole_vocabulary(drafter.tensors, shape.vocab_size), "midlayer.", "layers.0.")
        embedding = tensors.pop("embed_tokens.weight", None)
        embedding = (source.embedding() if embedding is None else embedding).to(dtype_of(drafter)).clone()
        tensors["embed_tokens.weight"] = embedding
        if kind == "peagle":
            config["mask_token_id"] = spare = _spare_token(shape)
            mask = tensors.pop("mask_token", None)
            if mask is not None:
                embedding[spare] = mask
            if "mask_hidden" in tensors:
                tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
        return Checkpoint(config, tensors)

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return "speculators_model_type" in config or "speculators_config" in config

    def check_config(self, config: Config, location: str) -> None:
        check_facts(config, {"speculators_model_type": Fact(str, only=tuple(TYPES.values()))}, location)
        kind = str(config["speculators_model_type"])
        check_architecture(config, ARCHITECTURES[kind], location)
        block = config.get(LAYER)
        if not isinstance(block, dict):
            raise UserError(f"{location}/config.json: {LAYER} is missing, or no mapping; it holds the Llama fields")
        check_facts(block, {"model_type": Fact(str, only=("llama", "qwen3"))}, location)
        check_block(block, location)
        check_eagle3(config, block, location, one_layer=kind == "eagle3")
        check_facts(config, {"norm_before_residual": Fact(bool)}, location)
        if kind == "peagle":
            check_facts(config, {"mask_token_id": Fact(int, least=0)}, location)
            if config["mask_token_id"] >= block["vocab_size"]:
                raise UserError(f"{location}/config.json: mask_token_id {config['mask_token_id']} is no token")
        check_proposals(config, kind, location)

    def expected(self, config: Config) -> dict[str, Spec]:
        block = config[LAYER]
        specs = eagle3_specs(config, block, "layers.0.")
        for layer in range(1, block["num_hidden_layers"]):
            specs |= block_specs(block, f"layers.{layer}.")
        if config["speculators_model_type"] == "peagle":
            width = num_taps(config) * int(config.get("target_hidden_size") or block["hidden_size"])
            specs["mask_hidden"] = Spec((1, 1, width))
            specs["embed_tokens.weight"] = specs["embed_tokens.weight"]._replace(optional=False)
        return specs

    def check_values(self, checkpoint: Checkpoint, location: str) -> None:
        check_vocabulary_pair(checkpoint, location)
        check_embedding(checkpoint, checkpoint.config[LAYER], location)

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        check_positions(config[LAYER], shape, location)
        check_width({**config[LAYER], **config}, shape, location)
        check_taps(config, shape.num_layers, location)
        check_verifier(config, shape, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config, block = checkpoint.config, checkpoint.config[LAYER]
        tensors = dict(checkpoint.tensors)
        embedding = tensors.get("embed_tokens.weight")
        settings: JsonObject = {"intermediate_size": block["intermediate_size"]}
        settings |= own_block(block, source.shape, self.format)
        settings |= own_embedding(tensors, source, config.get("mask_token_id"))
        flags, taps = eagle3_flags(config), tuple(tap_ids(config) or ())
        depth = int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
        if config["speculators_model_type"] == "eagle3":
            settings |= {"ttt_steps": depth, **flags}
            tensors = replace_prefix(tensors, "layers.0.", "midlayer.")
            return DrafterState("eagle3", settings, tensors, tap_layers=taps)
        if any(flags.values()):
            raise UserError(f"{self.format}: Draftsmith's P-EAGLE network has none of EAGLE-3's norm flags")
        assert embedding is not None
        settings |= {"parallel_depth": depth, "num_layers": block["num_hidden_layers"]}
        tensors["mask_token"] = embedding[config["mask_token_id"]].clone()
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
        return DrafterState("p-eagle", settings, tensors, tap_layers=taps)


def proposals_of(algorithm: str, num_tokens: int, source: Source) -> JsonObject:
    """The section `speculators_config`: what is proposed, and for which target.

    speculators opens the verifier whenever it loads the drafter (vLLM does not). A hub id is written, a local path is
    not: whoever loads the drafter of a private target with speculators adds it here.
    """
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {
            "name_or_path": source.name.partition("@")[0] if "/" in source.name else None,
            "architectures": [source.shape.architecture],
        },
    }


def check_verifier(config: Config, shape: TargetShape, location: str) -> None:
    """Raises UserError for a target of another architecture than the verifier that `speculators_config` names."""
    named = config["speculators_config"]["verifier"]["architectures"]
    if named and shape.architecture not in named:
        raise UserError(
            f"{location}/config.json: its verifier is {named[0]}, the target is {shape.architecture}:"
            " it was made for another target"
        )


def _spare_token(shape: TargetShape) -> int:
    """A token whose embedding no drafter reads; raises UserError where the target has none."""
    end_tokens = set(shape.eos_token_ids)
    for token in (shape.pad_token_id, shape.bos_token_id):
        if token is not None and token not in end_tokens:
            return token
    raise UserError(
        "speculators checkpoint: P-EAGLE's mask needs a token of its own, and the target names no padding or first"
        " token that is not its end token; name one in the target's config.json (pad_token_id)"
    )


def check_proposals(config: Config, kind: str, location: str) -> None:
    """Check the fields of speculators_config that vLLM and speculators read. Raises UserError, one line."""
    section = config.get("speculators_config")
    at = f"{location}/config.json"
    if not isinstance(section, dict) or section.get("algorithm") != kind:
        raise UserError(f"{at}: speculators_config.algorithm must be {kind!r}, as speculators_model_type says")
    methods = section.get("proposal_methods")
    if not isinstance(methods, list) or not all(isinstance(one, dict) for one in methods):
        raise UserError(f"{at}: speculators_config.proposal_methods must be a list of mappings")
    if not methods or section.get("default_proposal_method") not in [one.get("proposal_type") for one in methods]:
        raise UserError(f"{at}: speculators_config must name a default_proposal_method among its proposal_methods")
    check_facts(methods[0], {"speculative_tokens": COUNT}, location)
    verifier = section.get("verifier")
    if not isinstance(verifier, dict) or "name_or_path" not in verifier:
        raise UserError(f"{at}: speculators_config.verifier must name the target (name_or_path, architectures)")
    if not isinstance(verifier.get("architectures"), list):
        raise UserError(f"{at}: speculators_config.verifier.architectures must be a list")
