"""The shape of a target, read from its Hugging Face configuration before any weight; light, without torch.

Our drafters rotate whole heads by rope_theta alone, whatever their target does (drafts/network/layers.py). That is
right where an engine builds them from their own config, and a fault where it builds them from the target's: so the
shape names the scaling of the target's rotary positions.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.contract import UserError
from components.outside_json import JsonObject
from components.text import message_of

TapLayers = tuple[int, ...]
"""Tapped layers as HF hidden_states indices, in the order in which their states stand side by side."""


@dataclass(frozen=True)
class TargetShape:
    """The part of a target's configuration that drafters, caches and exporters need."""

    architecture: str  # "LlamaForCausalLM", ...
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    rope_scaling: str = ""  # of rope_scaling_of; "" where positions are rotated by rope_theta alone

    @property
    def tap_layers(self) -> TapLayers:
        """The layers that are tapped unless others are named: see `taps_of`; () where there are too few layers."""
        return taps_of(self.num_layers) if self.num_layers >= MIN_LAYERS else ()

    @property
    def has_usual_taps(self) -> bool:
        """Whether the taps are those that engines take where a drafter's config names none: 2, n//2, n-3."""
        return self.num_layers >= FEWEST_LAYERS_OF_USUAL_TAPS


FEWEST_LAYERS_OF_USUAL_TAPS = 7
"""Fewest layers of which 2, n//2 and n-3 are three different ones before the last."""
MIN_LAYERS = 4
"""Fewest layers that have three outputs before the last layer's."""


def taps_of(num_layers: int) -> tuple[int, int, int]:
    """The hidden_states that drafters read of a target: EAGLE-3's 2, n//2 and n-3, in shallow targets 1, n//2, n-1."""
    if num_layers < FEWEST_LAYERS_OF_USUAL_TAPS:
        return (1, num_layers // 2, num_layers - 1)
    return (2, num_layers // 2, num_layers - 3)


def check_tap_layers(layers: Sequence[int], num_layers: int, location: str) -> TapLayers:
    """The layers as a tuple; raises UserError (naming `location`) unless they ascend and the target has them all.

    hidden_states[0] is the embedding, and the last layer's output is normed in some engines and raw in others.
    """
    taps = tuple(layers)
    if fault := tap_layers_fault(taps):
        raise UserError(f"{location}: tap_layers {fault}")
    if taps[-1] >= num_layers:
        raise UserError(
            f"{location}: tap_layers {list(taps)!s:.60}: the target has {num_layers} layers, of which 1 to"
            f" {num_layers - 1} can be tapped"
        )
    return taps


def tap_layers_fault(layers: Sequence[int]) -> str:
    """What is wrong with a list of tapped layers of any target, the end of a sentence; "" where nothing is."""
    if layers and layers[0] >= 1 and all(one < other for one, other in itertools.pairwise(layers)):
        return ""
    return f"{list(layers)!s:.60} must be different layers from 1 on, ascending"


_POSITIVE = (
    *("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
_LARGEST = 1 << 31
_MAX_LAYERS = 10_000


def shape_of(config: Any, location: str, *, tapped: bool = True) -> TargetShape:
    """Read a transformers configuration; raises UserError (naming `location`) for one that Draftsmith cannot work with.

    tapped: whether feature taps are needed, which takes MIN_LAYERS layers.
    """
    try:
        shape = _shape_of(config, _text_config(config), location, tapped)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        message = message_of(error, 160)
        raise UserError(f"{location}: config.json does not describe a causal LM of a known kind ({message})") from error
    for name in _POSITIVE:
        if not 0 < (value := getattr(shape, name)) <= _LARGEST:
            raise UserError(f"{location}: config.json says {name} {value}, which no model has")
    if shape.num_layers > _MAX_LAYERS:
        raise UserError(f"{location}: config.json says num_layers {shape.num_layers}, which no model has")
    if not 0 <= shape.rms_norm_eps < 1 or not 0 < shape.rope_theta < math.inf:
        values = f"rms_norm_eps {shape.rms_norm_eps} and rope_theta {shape.rope_theta}"
        raise UserError(f"{location}: config.json says {values}, which give no numbers")
    if shape.num_attention_heads % shape.num_key_value_heads:
        heads = f"{shape.num_attention_heads} attention heads, {shape.num_key_value_heads} of keys and values"
        raise UserError(f"{location}: config.json says {heads}, which do not go together")
    return shape


def _text_config(config: Any) -> Any:
    """The language model's part, of which values that differ from layer to layer can be read as well."""
    text = copy.copy(config.get_text_config(decoder=True))
    text.allow_global_per_layer_attribute_access = True
    return text


def _shape_of(outer: Any, config: Any, location: str, tapped: bool) -> TargetShape:
    """outer: the whole configuration, whose architecture engines go by; config: of its language model."""
    named = outer.architectures or config.architectures
    architecture = named[0] if named else type(config).__name__.replace("Config", "ForCausalLM")
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{location}: {architecture} has an encoder; Draftsmith needs a decoder-only causal LM")
    num_layers = int(config.num_hidden_layers)
    if tapped and num_layers < MIN_LAYERS:
        raise UserError(
            f"{location}: {num_layers} layers; three auxiliary hidden states need at least {MIN_LAYERS}; "
            "choose a deeper model"
        )
    hidden_size = int(config.hidden_size)
    heads = _attention_heads(config)
    head_dim = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or hidden_size // heads
    return TargetShape(
        architecture=architecture,
        model_type=str(config.model_type),
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config, hidden_size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        vocab_size=int(config.vocab_size),
        rms_norm_eps=float(next((v for name in _EPSILONS if (v := getattr(config, name, None)) is not None), 1e-6)),
        rope_theta=float(rope_parameters(config).get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0),
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or UNBOUNDED_POSITIONS),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_ids=as_ids(getattr(config, "eos_token_id", None)),
        pad_token_id=getattr(config, "pad_token_id", None),
        rope_scaling=rope_scaling_of(rope_parameters(config), getattr(config, "partial_rotary_factor", None)),
    )


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
UNBOUNDED_POSITIONS = 1 << 20
"""Positions of a model whose configuration names no limit (recurrent states have none)."""


def _attention_heads(config: Any) -> int:
    """Attention heads; where no layer attends, as many of width 64 as the hidden size holds."""
    return int(getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64))


def _intermediate_size(config: Any, hidden_size: int) -> int:
    """Width of the feed-forward layers, which drafters take over; of the widest where layers differ.

    Configurations that name none (GPT-2, experts only) mean four times the hidden size.
    """
    sizes = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden_size
    return int(max(sizes) if isinstance(sizes, list | tuple) else sizes)


LAYER_KINDS = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunk",
    "indexed_attention": "sparse",
    "hybrid": "full and state",
    "hybrid_sliding": "window and state",
    "attention": "full",
    **dict.fromkeys(("linear_attention", "conv", "mamba"), "state"),
}
"""Layer types of transformers, in words; others stand under their own names."""
WITHOUT_ATTENTION = ("moe", "mlp", "dummy")
"""Layer types that look at no other position and keep nothing."""


def layer_kinds(config: Any) -> list[str]:
    """The kinds of layers of a model, each once: what of the text so far they look at."""
    return sorted({LAYER_KINDS.get(name, name) for name in layer_types_of(_text_config(config))})


def layer_types_of(config: Any) -> list[str]:
    """transformers' type of each layer of a text model; where its configuration names none, all are of one type."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return list(types)
    window, chunk = _heeded(config, "sliding_window"), _heeded(config, "attention_chunk_size")
    name = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    return [name] * int(config.num_hidden_layers)


def _heeded(config: Any, name: str) -> Any:
    """A setting that cuts attention; None where config.json has it and the model's class in transformers does not.

    The forward passes of Llama and Gemma attend to everything, whatever stands there. A class from outside says what it
    has only when it is read, and is believed.
    """
    kind = type(config)
    return (
        getattr(config, name, None) if hasattr(kind, name) or not kind.__module__.startswith("transformers.") else None
    )


def kv_bytes_per_token(config: Any, itemsize: int) -> int:
    """Bytes one token takes in the KV cache over all layers; itemsize: bytes of one number.

    Recurrent layers take none: their states have one size. Multi-head and grouped-query attention: 2 n h_kv d.
    Multi-head latent attention (DeepSeek-V2/V3; transformers caches the compressed latent and the shared rotary key):
    n (kv_lora_rank + qk_rope_head_dim).
    """
    config = _text_config(config)
    layers = config.per_layer_config
    sharing = getattr(config, "kv_sharing_modes", None) or [""] * len(layers)
    kinds = zip(layers, layer_types_of(config), sharing, strict=True)
    return itemsize * sum(_kv_numbers(layer, name) for layer, name, shared in kinds if shared != "reuse")


def _kv_numbers(layer: Any, layer_type: str) -> int:
    """Numbers that a layer of this configuration caches for each token."""
    if LAYER_KINDS.get(layer_type) == "state" or layer_type in WITHOUT_ATTENTION:
        return 0
    indexer = int(layer.index_head_dim) if layer_type == "indexed_attention" else 0
    if getattr(layer, "kv_lora_rank", None) and hasattr(layer, "qk_rope_head_dim"):
        return int(layer.kv_lora_rank + layer.qk_rope_head_dim) + indexer
    attention_heads = _attention_heads(layer)
    heads = getattr(layer, "num_key_value_heads", None) or attention_heads
    width = getattr(layer, "head_dim", None) or layer.hidden_size // attention_heads
    return int(heads * (width + (getattr(layer, "v_head_dim", None) or width))) + indexer


def rope_parameters(config: Any) -> JsonObject:
    """The rotary settings, under either of their two names; those of full attention where layer types differ."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    by_type = [value for name, value in sorted(rope.items()) if name.endswith("_attention") and isinstance(value, dict)]
    return dict(rope.get("full_attention") or by_type[0]) if by_type else rope


def as_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    """eos_token_id may be absent, one id or several."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def rope_scaling_of(rope: JsonObject, partial_rotary_factor: float | None = None) -> str:
    """The rotary scaling as text: "" for plain positions, else "yarn", "partial_rotary_factor 0.5" or both.

    rope: `rope_parameters`, or `rope_scaling` as older configs call it; {} for neither. partial_rotary_factor: the
    config's own entry of that name, if any.
    """
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    share = rope.get("partial_rotary_factor") or partial_rotary_factor or 1.0
    parts = [] if kind == "default" else [kind]
    if float(share) != 1.0:
        parts.append(f"partial_rotary_factor {float(share):g}")
    return " and ".join(parts)
