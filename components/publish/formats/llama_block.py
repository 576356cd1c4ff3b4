"""The Llama decoder block that most formats use: its config fields, its tensors, their checks, and the layout's frame.

A checkpoint is checked against its own config.json, whose sizes determine the shapes, so that a checkpoint can be
checked without its target. With a target, `check_positions` and `check_width` compare what the two must share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch

from components.contract import UserError
from components.drafts.settings import OWN_SIZES, read_window, rope_scaling_fault
from components.outside_json import JsonObject
from components.publish.formats.checkpoint import Config, Spec, name_of
from components.publish.formats.interface import AbstractLayout, DrafterState, settings_of
from components.targets.shape import TargetShape


class Fact(NamedTuple):
    """The rule for one field of config.json. kind: its type; least, most: its bounds; only: the allowed values."""

    kind: type
    least: float | None = None
    only: tuple[Any, ...] = ()
    optional: bool = False
    most: float | None = None


COUNT = Fact(int, least=1)
LAYERS = Fact(int, least=1, most=1024)
"""A count that the checks loop over: its bound keeps a stranger's config from blocking them for hours."""
LARGEST = 2**53
"""Above this number a float no longer holds every integer."""
OFF = Fact(bool, only=(False,), optional=True)
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
BLOCK_FACTS: dict[str, Fact] = {
    "hidden_size": COUNT,
    "intermediate_size": COUNT,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "head_dim": Fact(int, least=2, optional=True),
    "hidden_act": Fact(str, only=("silu",)),
    "max_position_embeddings": COUNT,
    "rms_norm_eps": Fact(float, least=1e-12),
    "rope_theta": Fact(float, least=1.0),
    "vocab_size": COUNT,
    "tie_word_embeddings": Fact(bool, optional=True),
    "attention_bias": OFF,
    "mlp_bias": OFF,
    # Engines read `bias` as the attention's, and leave biases that the file lacks uninitialised.
    "bias": OFF,
    "torch_dtype": Fact(str, only=DTYPES, optional=True),
    "dtype": Fact(str, only=DTYPES, optional=True),
}


class AbstractLlamaLayout(AbstractLayout):
    """A format of Llama blocks.

    architectures: the names of the network that are accepted, the written one first. model_types: the same for the
    field that readers look at before `architectures`.
    """

    architectures: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def names(self) -> JsonObject:
        """The first fields of config.json, by which engines find the class that reads it."""
        return {"architectures": [self.architectures[0]], "model_type": self.model_types[0]}

    def check_config(self, config: Config, location: str) -> None:
        check_architecture(config, self.architectures, location)
        check_facts(config, {"model_type": Fact(str, only=self.model_types)}, location)
        check_block(config, location)

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        check_positions(config, shape, location)
        check_width(config, shape, location)


def dtype_of(drafter: DrafterState) -> torch.dtype:
    """The floating dtype of a drafter's weights; float32 for a drafter without weights."""
    return next((t.dtype for _, t in sorted(drafter.tensors.items()) if t.is_floating_point()), torch.float32)


def block_config(drafter: DrafterState, shape: TargetShape, num_layers: int = 1) -> JsonObject:
    """The fields of a block with the target's heads, positions and rotary base, or the drafter's own.

    `rope_theta` is at top level, because engines that look only there fall back to 10000. max_position_embeddings is
    the target's: 2048, as in the first EAGLE-3 release, makes acceptance collapse on longer texts.
    """
    shape = replace(shape, **{name: drafter.settings[name] for name in OWN_SIZES if drafter.settings.get(name)})
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": int(drafter.settings.get("intermediate_size") or shape.intermediate_size),
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_ids[0] if shape.eos_token_ids else None,
        "pad_token_id": shape.pad_token_id,
        "torch_dtype": name_of(dtype_of(drafter)),
    }


def scaling_field(drafter: DrafterState) -> JsonObject:
    """`rope_scaling` of a drafter with a rotary scaling of its own; {} for others."""
    return {"rope_scaling": scaling} if (scaling := drafter.settings.get("rope_scaling")) else {}


def window_fields(drafter: DrafterState, num_layers: int = 1) -> JsonObject:
    """The fields that give every layer of a drafter its window; {} where it attends to everything."""
    if not (window := drafter.settings.get("window")):
        return {}
    switch = {"use_sliding_window": True, "max_window_layers": 0} if settings_of(drafter).qk_norm else {}
    return {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": window, **switch}


def refuse_qk_norm(drafter: DrafterState, format: str) -> None:
    """Raise UserError for a drafter whose queries and keys have norms: readers of Llama blocks pass over them."""
    if drafter.settings.get("qk_norm"):
        raise UserError(
            f"{format}: this drafter's block is Qwen3's (qk_norm), which the format has not; say speculators"
        )


def own_block(config: Config, shape: TargetShape, location: str) -> JsonObject:
    """The settings of a drafter whose block is not the target's in every field: the inverse of `block_config`.

    Raises UserError for a rotary scaling or a window that no drafter here can have.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "type") and value is not None}
    scaling = {"rope_type": rope.get("rope_type") or rope.get("type") or "default", **scaling}
    scaling = {} if scaling["rope_type"] == "default" else scaling
    if fault := rope_scaling_fault(scaling):
        raise UserError(f"{location}: {fault}")
    window, fault = read_window(config)
    if fault:
        raise UserError(f"{location}: {fault}")
    stated = {**config, "head_dim": head_dim_of(config)}
    return {name: stated[name] for name in OWN_SIZES if stated[name] != getattr(shape, name)} | (
        ({"rope_scaling": scaling} if scaling else {})
        | ({"qk_norm": True} if has_qk_norm(config) else {})
        | ({"window": window} if window else {})
    )


def has_qk_norm(config: Config) -> bool:
    """Whether a block's queries and keys have norms: Qwen3's have."""
    return config.get("model_type") == "qwen3"


def head_dim_of(config: Config) -> int:
    """The head size: the stated one, or the width divided by the number of heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def block_specs(config: Config, at: str, *, in_features: int = 0, input_norm: bool = True) -> dict[str, Spec]:
    """The tensors of one block. at: prefix of their names; in_features: input size of q, k and v, 0 for the width."""
    hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    queries = int(config["num_attention_heads"]) * head_dim_of(config)
    keys = int(config["num_key_value_heads"]) * head_dim_of(config)
    width = in_features or hidden
    specs = {
        "input_layernorm.weight": Spec((hidden,)),
        "self_attn.q_proj.weight": Spec((queries, width)),
        "self_attn.k_proj.weight": Spec((keys, width)),
        "self_attn.v_proj.weight": Spec((keys, width)),
        "self_attn.o_proj.weight": Spec((hidden, queries)),
        "post_attention_layernorm.weight": Spec((hidden,)),
        "mlp.gate_proj.weight": Spec((inner, hidden)),
        "mlp.up_proj.weight": Spec((inner, hidden)),
        "mlp.down_proj.weight": Spec((hidden, inner)),
    }
    if has_qk_norm(config):
        specs |= {f"self_attn.{one}_norm.weight": Spec((head_dim_of(config),)) for one in "qk"}
    if not input_norm:
        del specs["input_layernorm.weight"]
    return {at + name: spec for name, spec in specs.items()}


def check_architecture(config: Config, allowed: tuple[str, ...], location: str) -> None:
    """Check that the first entry of `architectures` is one of `allowed`. Raises UserError, one line."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or architectures[0] not in allowed:
        raise UserError(
            f"{location}/config.json: architectures is {architectures!r:.80}, must be one of {', '.join(allowed)}"
        )


def check_facts(config: Config, facts: Mapping[str, Fact], location: str) -> None:
    """Check fields of config.json. Raises UserError, one line, for the first that is missing or wrong."""
    for name, fact in facts.items():
        value = config.get(name)
        if value is None:
            if fact.optional:
                continue
            raise UserError(f"{location}/config.json: {name} is missing; engines would guess it: write it down")
        right = isinstance(value, fact.kind) or (fact.kind is float and isinstance(value, int))
        if not right or (isinstance(value, bool) and fact.kind is not bool):
            raise UserError(f"{location}/config.json: {name} is {value!r:.60}, must be of type {fact.kind.__name__}")
        if fact.only and value not in fact.only:
            allowed = " or ".join(repr(one) for one in fact.only)
            raise UserError(f"{location}/config.json: {name} is {value!r:.60}, must be {allowed}")
        if fact.kind in (int, float) and abs(value) > LARGEST:
            raise UserError(f"{location}/config.json: {name} is {value!r:.60}, must be a number that engines can hold")
        if fact.least is not None and not (math.isfinite(value) and value >= fact.least):
            raise UserError(f"{location}/config.json: {name} is {value!r:.60}, must be at least {fact.least:g}")
        if fact.most is not None and value > fact.most:
            raise UserError(f"{location}/config.json: {name} is {value!r:.60}, must be at most {fact.most:g}")


def check_block(config: Config, location: str) -> None:
    """Check the fields of a block, each and together. Raises UserError, one line."""
    check_facts(config, BLOCK_FACTS, location)
    check_rope(config, location)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % groups:
        raise UserError(
            f"{location}/config.json: {heads} attention heads do not share {groups} key/value heads evenly;"
            " num_attention_heads must be a multiple of num_key_value_heads"
        )
    if config.get("head_dim") is None and config["hidden_size"] % heads:
        raise UserError(f"{location}/config.json: head_dim is missing, and hidden_size is no multiple of the heads")
    if head_dim_of(config) % 2:
        raise UserError(f"{location}/config.json: head_dim is {head_dim_of(config)}, rotary pairs need an even one")
    if not config["rms_norm_eps"] <= 1e-2:
        raise UserError(f"{location}/config.json: rms_norm_eps is {config['rms_norm_eps']!r}, must be at most 0.01")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = config.get(name)
        for one in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < config["vocab_size"]:
                raise UserError(
                    f"{location}/config.json: {name} is {ids!r:.60}, must be an id below {config['vocab_size']}"
                )


def check_rope(config: Config, location: str) -> None:
    """Check `rope_parameters` and `rope_scaling` against rope_theta. Raises UserError, one line.

    Newer engines read the first, older ones the second, and both read it before the rope_theta at top level.
    """
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise UserError(f"{location}/config.json: {name} is {rope!r:.60}, must be a mapping")
        for kind in (rope.get("rope_type"), rope.get("type")):
            if kind is not None and (not isinstance(kind, str) or kind not in ROPE_TYPES):
                raise UserError(
                    f"{location}/config.json: rope_type is {kind!r:.60} in {name}, must be one of"
                    f" {', '.join(ROPE_TYPES)}"
                )
        check_facts(rope, {"rope_theta": BLOCK_FACTS["rope_theta"]._replace(optional=True)}, location)
        stated = rope.get("rope_theta", config["rope_theta"])
        if stated is not None and stated != config["rope_theta"]:
            raise UserError(
                f"{location}/config.json: rope_theta is {config['rope_theta']} and {stated} in {name}; engines"
                " read the one or the other"
            )


def check_positions(config: Config, shape: TargetShape, location: str) -> None:
    """Check that vocabulary and number of positions are the target's. Raises UserError, one line."""
    check_vocab_size(config, shape, location)
    if config["max_position_embeddings"] != shape.max_position_embeddings:
        raise UserError(
            f"{location}/config.json: max_position_embeddings is {config['max_position_embeddings']}, must be the"
            f" target's {shape.max_position_embeddings}: engines cut the rotary table there, and acceptance with it"
        )


def check_vocab_size(config: Config, shape: TargetShape, location: str) -> None:
    """Check that the vocabulary is the target's. Raises UserError, one line."""
    if config["vocab_size"] != shape.vocab_size:
        raise UserError(
            f"{location}/config.json: vocab_size is {config['vocab_size']}, the target's is {shape.vocab_size}:"
            " it was made for another target"
        )


def check_width(config: Config, shape: TargetShape, location: str) -> None:
    """Check the width of a drafter that reads its target's features or embedding. Raises UserError, one line."""
    for name in ("target_hidden_size", "hidden_size"):
        if name in config:
            if config[name] != shape.hidden_size:
                raise UserError(
                    f"{location}/config.json: {name} is {config[name]}, the target's width is {shape.hidden_size}:"
                    " it was made for another target"
                )
            return
