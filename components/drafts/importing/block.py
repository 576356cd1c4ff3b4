"""The decoder block that a checkpoint's config describes, with the defaults of Llama's own configuration class.

Engines build the block from these fields; names and defaults are Hugging Face's (LlamaConfig), also where a field is
absent. A field that no drafter of ours can honour is a fault, never a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from components.drafts.importing.reader import Faults
from components.drafts.settings import OWN_SIZES, read_window, rope_scaling_fault
from components.outside_json import JsonObject
from components.targets.shape import TargetShape, rope_scaling_of

DEFAULT_THETA = 10000.0
DEFAULT_EPS = 1e-6
LARGEST = 2**31
LLAMA_TYPES = ("llama",)
EAGLE_TYPES = ("llama", "qwen3")
"""Kinds of block that drafters of the EAGLE family have here; Qwen3's is Llama's with norms of queries and keys."""
DEFAULTS: dict[str, dict[str, int]] = {"qwen3": {"head_dim": 128, "num_key_value_heads": 32}}
"""Sizes that an absent field of a kind's config means, where they are not Llama's."""
PLAIN = ("default", "mrope")
"""Kinds of rotary positions that rotate a text by rope_theta alone; mrope splits the positions of images."""


@dataclass(frozen=True)
class FoundBlock:
    """The sizes of a checkpoint's block. rope_scaling: as `rope_scaling_of` says it, "" for plain positions.

    rope: what the config says of a scaling, {} for plain positions. qk_norm: every query and key has a norm.
    window: positions that each attends to, 0 for all.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: str
    rope: JsonObject
    qk_norm: bool = False
    window: int = 0


def read_block(
    config: JsonObject,
    faults: Faults,
    *,
    where: str = "",
    model_types: tuple[str, ...] = LLAMA_TYPES,
    windows: bool = False,
) -> FoundBlock | None:
    """The block in a config (or in a section of it, called `where` in faults); None, and a fault, where it has none.

    model_types: kinds of block that the format may have; "llama" also stands for a config without model_type.
    windows: whether the method's attention may have a window.
    """
    at = f"{where}." if where else ""
    kind = config.get("model_type", "llama")
    if kind not in model_types:
        faults.add(f"{at}model_type is {kind!r:.40}, whose block Draftsmith does not have; it has {model_types[0]}'s")
        return None
    before, defaults = len(faults.found), DEFAULTS.get(kind, {})
    heads = _count(config, "num_attention_heads", at, faults)
    hidden = _count(config, "hidden_size", at, faults)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        faults.add(f"{at}rope_parameters or rope_scaling is {rope!r:.40}, no mapping")
        rope = {}
    theta = rope.get("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    if config.get("rope_theta") not in (None, theta):
        faults.add(f"{at}rope_theta is {config['rope_theta']} at one place and {theta} at another")
    block = FoundBlock(
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size", at, faults),
        num_layers=_count(config, "num_hidden_layers", at, faults, 1),
        num_attention_heads=heads,
        num_key_value_heads=_count(
            config, "num_key_value_heads", at, faults, defaults.get("num_key_value_heads", heads)
        ),
        head_dim=_count(config, "head_dim", at, faults, defaults.get("head_dim", hidden // max(1, heads))),
        vocab_size=_count(config, "vocab_size", at, faults),
        max_position_embeddings=_count(config, "max_position_embeddings", at, faults, 2048),
        rms_norm_eps=_number(config.get("rms_norm_eps", DEFAULT_EPS), f"{at}rms_norm_eps", faults),
        rope_theta=_number(theta, f"{at}rope_theta", faults),
        rope_scaling=rope_scaling_of({**rope, **_kind_of(rope)}, config.get("partial_rotary_factor")),
        rope=_scaling(rope, config),
        qk_norm=kind == "qwen3",
        window=_window(config, at, faults, windows),
    )
    if config.get("hidden_act", "silu") != "silu":
        faults.add(f"{at}hidden_act is {config['hidden_act']!r:.40}; the block here has silu")
    return block if len(faults.found) == before else None


def check_block(
    block: FoundBlock, shape: TargetShape, faults: Faults, remarks: list[str], *, tied: tuple[str, ...]
) -> None:
    """Compare a block with its target's. tied: the fields in which our network follows the target, whatever is written.

    The vocabulary must agree in any case; a shorter rotary table is a remark, since here it is the target's.
    """
    if block.vocab_size != shape.vocab_size:
        faults.add(f"vocab_size is {block.vocab_size}, the target's is {shape.vocab_size}: made for another target")
    for name in tied:
        size, target_size = getattr(block, name), getattr(shape, name)
        if size != target_size:
            plain = "plain" if name == "rope_scaling" else ""
            faults.add(f"{name} is {size or plain}, the drafter here has the target's {target_size or plain}")
    if block.max_position_embeddings != shape.max_position_embeddings:
        remarks.append(
            f"max_position_embeddings is {block.max_position_embeddings}: engines cut the rotary table there; here"
            f" it reaches the target's {shape.max_position_embeddings}"
        )


def read_own_block(block: FoundBlock, shape: TargetShape, faults: Faults, remarks: list[str]) -> JsonObject:
    """The settings of EagleBlock in which a block is not its target's, each a remark; a fault for what it cannot be."""
    own: JsonObject = {"window": block.window} if block.window else {}
    if block.qk_norm:
        own["qk_norm"] = True
    if block.window:
        remarks.append(f"its attention sees {block.window} positions")
    for name in OWN_SIZES:
        size, target_size = getattr(block, name), getattr(shape, name)
        if size != target_size:
            own[name] = size
            remarks.append(f"{name} is {size}, the target's is {target_size}")
    if "partial_rotary_factor" in block.rope_scaling:
        faults.add(f"its rotary positions are partial ({block.rope_scaling}), those of a drafter here are not")
    elif block.rope:
        if fault := rope_scaling_fault(block.rope):
            faults.add(fault)
        else:
            own["rope_scaling"] = block.rope
            remarks.append(f"its rotary positions are scaled ({block.rope_scaling})")
    return own


def _window(config: JsonObject, at: str, faults: Faults, windows: bool) -> int:
    """The window of a block, 0 for none; a fault where it is none, or the method's attention has none."""
    size, fault = read_window(config)
    if fault:
        faults.add(at + fault)
    elif size and not windows:
        faults.add(f"{at}layer_types asks for a window; such drafters attend to everything here")
    return size


def _kind_of(rope: JsonObject) -> JsonObject:
    """The kind of rotary positions under today's name; a kind that is plain for text becomes "default"."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {"rope_type": "default" if kind in PLAIN else kind}


def _scaling(rope: JsonObject, config: JsonObject) -> JsonObject:
    """A rotary scaling under today's names, without the base; {} for plain positions.

    Of yarn what transformers fills in is written down: the length that the model knew, and the factor beyond it.
    """
    kind = _kind_of(rope)
    if kind["rope_type"] == "default":
        return {}
    without = ("rope_theta", "type", "rope_type", "partial_rotary_factor")
    scaling = kind | {name: value for name, value in rope.items() if name not in without and value is not None}
    longest = config.get("max_position_embeddings")
    if kind["rope_type"] == "yarn" and type(longest) is int:
        scaling.setdefault("original_max_position_embeddings", longest)
        original = scaling["original_max_position_embeddings"]
        if type(original) is int and original > 0:
            scaling.setdefault("factor", longest / original)
    return scaling


def _count(config: JsonObject, name: str, at: str, faults: Faults, default: int | None = None) -> int:
    value: Any = config.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < LARGEST:
        faults.add(f"{at}{name} is {value!r:.40}, no size" if value is not None else f"{at}{name} is missing")
        return 1
    return value


def _number(value: Any, name: str, faults: Faults) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        faults.add(f"{name} is {value!r:.40}, no positive number")
        return 1.0
    return float(value)
