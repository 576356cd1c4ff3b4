"""What our own forward pass needs to know of an architecture, read from its configuration in one place.

`architecture_of` knows a configuration or gives None; `tensors_of` names each tensor of such a checkpoint with its
shape. One tensor more or less is another architecture under a known name: `is_supported` says no, and transformers
runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from components.contract import UserError
from components.outside_json import JsonObject
from components.targets.forward.slot_cache import mask_plan
from components.targets.shape import TargetShape, layer_types_of, rope_parameters

ReadWeight = Callable[[str], Tensor]
"""Gives a tensor of the checkpoint by its name; KeyError where there is none."""
Activation = Literal["silu", "gelu_pytorch_tanh"]


class ClampedSwiglu(NamedTuple):
    """gate sigmoid(alpha gate) (up + 1), with gate at most `limit` and up between -limit and limit (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertSettings:
    """A mixture of experts in the place of some layers' MLP.

    layers: of each layer whether it has one. width: intermediate size of an expert. is_normalised: whether the weights
    of the chosen experts add up to one. module: its name below the layer; router: its router's below that; parts: the
    names of an expert's gate, up and down projections. Without parts each kind of weight is one tensor of all experts
    [experts, in, out], with gate and up in turns, and all layers have biases (gpt-oss).
    """

    layers: tuple[bool, ...]
    count: int
    per_token: int
    width: int
    is_normalised: bool
    module: str
    router: str = "gate"
    parts: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Architecture:
    """The differences between the families that our own forward pass runs.

    windows: of each layer the number of positions that it sees, its own among them; 0: all.
    rope_kinds: of each layer the index of its rotary settings in `ropes`; ropes: layer type (None: one for all layers)
        and settings.
    qk_norm: queries and keys are normed by head (Qwen3). plus_one: norm weights are stored less one (Gemma).
    sandwich: what attention and MLP add is normed as well (Gemma 2 and 3).
    joined: q, k, v are stored as one tensor, gate and up as another (Phi-3).
    experts: of layers with a mixture of experts.
    exact_norms: norm weights multiply in float32 (gpt-oss).
    sinks: every head's softmax counts one more score, which no value answers to (gpt-oss).
    query_scale: of q . k; 0: 1 / sqrt(head_dim). attention_cap, logit_cap: c tanh(x / c) of scores and logits; 0: none.
    """

    windows: tuple[int, ...]
    rope_kinds: tuple[int, ...]
    ropes: tuple[tuple[str | None, JsonObject], ...]
    activation: Activation | ClampedSwiglu = "silu"
    qk_norm: bool = False
    plus_one: bool = False
    sandwich: bool = False
    joined: bool = False
    exact_norms: bool = False
    sinks: bool = False
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    experts: ExpertSettings | None = None

    @property
    def mlp_norm(self) -> str:
        """The name of the norm in front of the MLP."""
        return "pre_feedforward_layernorm" if self.sandwich else "post_attention_layernorm"


GEMMAS = frozenset({"gemma", "gemma2", "gemma3_text"})
FAMILIES = GEMMAS | frozenset(
    {"llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "qwen3_moe", "mixtral", "gpt_oss"}
)
"""Families whose passes are at least 1.1 times as fast as transformers' (the median of benchmarks/own_pass.py)."""
LIKE_LLAMA_AT_THE_ENDS = frozenset({"deepseek_v3", "ernie4_5_moe", "glm4_moe", "qwen3_next"})
"""Families that transformers runs, of which embedding, final norm and head can be opened alone all the same."""
ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
ROPE_TYPES = frozenset({"default", "llama3", "linear", "yarn"})
_ATTENTION = {"full_attention", "sliding_attention"}


def architecture_of(config: Any) -> Architecture | None:
    """What a transformers configuration describes; None where our own forward pass does not know it."""
    family = config.model_type
    if family not in FAMILIES or getattr(config, "use_bidirectional_attention", False):
        return None
    types, has_sandwich = layer_types_of(config), family in ("gemma2", "gemma3_text")
    ropes = _ropes_of(config, types)
    activation = config.hidden_activation if has_sandwich else config.hidden_act
    is_gpt_oss = family == "gpt_oss"
    is_known = set(types) <= _ATTENTION and all(_is_known_rope(rope) for _, rope in ropes)
    if not is_known or activation not in get_args(Activation):
        return None
    plan, kind_of = mask_plan(config, family).by_type, {name: number for number, (name, _) in enumerate(ropes)}
    masks = [mask for name in types if (mask := plan.get(name, plan.get(""))) is not None]
    if any(mask.size < 0 for mask in masks) or (has_sandwich and config.query_pre_attn_scalar <= 0):
        return None  # transformers says what is wrong
    experts = _experts_of(config)
    if experts is not None and not 0 < experts.per_token <= experts.count:
        return None
    return Architecture(
        windows=tuple(mask.size for mask in masks),
        rope_kinds=tuple(kind_of.get(name, 0) for name in types),
        ropes=ropes,
        activation=ClampedSwiglu(config.swiglu_alpha, config.swiglu_limit) if is_gpt_oss else activation,
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        plus_one=family in GEMMAS,
        sandwich=has_sandwich,
        joined=family == "phi3",
        exact_norms=is_gpt_oss,
        sinks=is_gpt_oss,
        embedding_scale=config.hidden_size**0.5 if family in GEMMAS else 1.0,
        query_scale=config.query_pre_attn_scalar**-0.5 if has_sandwich else 0.0,
        # Gemma 3 has the setting as well, and its attention ignores it.
        attention_cap=float(config.attn_logit_softcapping or 0.0) if family == "gemma2" else 0.0,
        logit_cap=float(config.final_logit_softcapping or 0.0) if has_sandwich else 0.0,
        experts=experts,
    )


def ends_of(config: Any, names: set[str]) -> Architecture | None:
    """An architecture whose embedding, final norm and head are those of this checkpoint; its layers are not known."""
    if config.model_type not in LIKE_LLAMA_AT_THE_ENDS or not names.issuperset(_ends_stored(config)):
        return None
    return Architecture(windows=(), rope_kinds=(), ropes=(), plus_one=config.model_type == "qwen3_next")


def _ends_stored(config: Any) -> tuple[str, ...]:
    return ENDS[:2] if config.tie_word_embeddings else ENDS


def _experts_of(config: Any) -> ExpertSettings | None:
    """The mixture of experts of a configuration of FAMILIES, if it has one."""
    layers = range(config.num_hidden_layers)
    if config.model_type in ("mixtral", "gpt_oss"):
        count, per_token, width = config.num_local_experts, config.num_experts_per_tok, config.intermediate_size
        every = (True,) * len(layers)
        if config.model_type == "gpt_oss":
            return ExpertSettings(every, count, per_token, width, True, "mlp", "router", None)
        return ExpertSettings(every, count, per_token, width, True, "block_sparse_moe", parts=("w1", "w3", "w2"))
    if config.model_type != "qwen3_moe" or not config.num_experts:
        return None
    dense, step = config.mlp_only_layers or (), config.decoder_sparse_step
    return ExpertSettings(
        layers=tuple(layer not in dense and step > 0 and (layer + 1) % step == 0 for layer in layers),
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        is_normalised=bool(config.norm_topk_prob),
        module="mlp",
    )


def _ropes_of(config: Any, types: list[str]) -> tuple[tuple[str | None, JsonObject], ...]:
    """The rotary settings: one for all layers, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    if not _ATTENTION & set(rope):
        return ((None, rope_parameters(config)),)
    return tuple((name, dict(rope.get(name) or {})) for name in sorted(set(types)))


def _is_known_rope(rope: JsonObject) -> bool:
    return rope.get("rope_type", "default") in ROPE_TYPES and rope.get("partial_rotary_factor", 1.0) == 1.0


def is_supported(config: Any, shape: TargetShape, names: set[str]) -> bool:
    """Whether FastTarget can run this configuration with these tensors; else TransformersTarget does."""
    architecture = architecture_of(config)
    if architecture is None or len(architecture.windows) != shape.num_layers:
        return False
    return names == set(tensors_of(architecture, shape, names))


def check_shapes(config: Any, shape: TargetShape, shapes: Mapping[str, list[int]], location: str) -> None:
    """Raises UserError where a tensor has another shape than config.json implies. shapes: by tensor name."""
    architecture = architecture_of(config)
    table, width = [shape.vocab_size, shape.hidden_size], [shape.hidden_size]
    tensors = dict(zip(_ends_stored(config), (table, width, table), strict=False))
    if architecture is not None:
        tensors = tensors_of(architecture, shape, set(shapes))
    for name, expected in tensors.items():
        if shapes[name] != expected:
            raise UserError(
                f"{location}: {name} is {shapes[name]}, and config.json asks for {expected}: they do not go together"
            )


def tensors_of(architecture: Architecture, shape: TargetShape, present: set[str]) -> dict[str, list[int]]:
    """Names and shapes of such a checkpoint's tensors; biases of attention's projections and lm_head where present."""
    width, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    tensors = {"model.embed_tokens.weight": [shape.vocab_size, width], "model.norm.weight": [width]}
    if "lm_head.weight" in present or not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = [shape.vocab_size, width]
    sides = {"qkv": queries + 2 * keys} if architecture.joined else {"q": queries, "k": keys, "v": keys}
    halves = {"gate_up": 2 * inner} if architecture.joined else {"gate": inner, "up": inner}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture.sandwich:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    experts = architecture.experts
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{norm}.weight": [width] for norm in norms}
        tensors |= {f"{prefix}self_attn.{part}_proj.weight": [rows, width] for part, rows in sides.items()}
        tensors[f"{prefix}self_attn.o_proj.weight"] = [width, queries]
        if architecture.sinks:
            tensors[f"{prefix}self_attn.sinks"] = [shape.num_attention_heads]
        if architecture.qk_norm:
            tensors |= {f"{prefix}self_attn.{part}_norm.weight": [head_dim] for part in "qk"}
        biases = {f"{prefix}self_attn.{part}_proj.bias": [rows] for part, rows in sides.items()}
        if set(biases) & present:  # one linear layer: all of them or none
            tensors |= biases
        if (bias := f"{prefix}self_attn.o_proj.bias") in present:
            tensors[bias] = [width]
        if experts is not None and experts.layers[layer]:
            tensors |= _tensors_of_experts(experts, f"{prefix}{experts.module}.", width)
            continue
        tensors |= {f"{prefix}mlp.{part}_proj.weight": [rows, width] for part, rows in halves.items()}
        tensors[f"{prefix}mlp.down_proj.weight"] = [width, inner]
    return tensors


def _tensors_of_experts(experts: ExpertSettings, prefix: str, width: int) -> dict[str, list[int]]:
    """Names and shapes of one layer's mixture."""
    tensors = {f"{prefix}{experts.router}.weight": [experts.count, width]}
    if experts.parts is None:
        for name, rows, columns in (("gate_up", 2 * experts.width, width), ("down", width, experts.width)):
            tensors[f"{prefix}experts.{name}_proj"] = [experts.count, columns, rows]
            tensors[f"{prefix}experts.{name}_proj_bias"] = [experts.count, rows]
        return tensors | {f"{prefix}{experts.router}.bias": [experts.count]}
    sizes = ([experts.width, width], [experts.width, width], [width, experts.width])
    for number in range(experts.count):
        for part, size in zip(experts.parts, sizes, strict=True):
            tensors[f"{prefix}experts.{number}.{part}.weight"] = size
    return tensors


def read_apart(read: ReadWeight, shape: TargetShape) -> ReadWeight:
    """`read` of a checkpoint with joined projections, by the names of their parts."""
    queries, keys = (heads * shape.head_dim for heads in (shape.num_attention_heads, shape.num_key_value_heads))
    rows = {
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, keys),
        "v_proj": ("qkv_proj", queries + keys, keys),
        "gate_proj": ("gate_up_proj", 0, shape.intermediate_size),
        "up_proj": ("gate_up_proj", shape.intermediate_size, shape.intermediate_size),
    }

    def part_of(name: str) -> Tensor:
        layer, _, ending = name.removesuffix(".weight").rpartition(".")
        if ending not in rows or not name.endswith(".weight"):
            return read(name)
        joined, start, length = rows[ending]
        return read(f"{layer}.{joined}.weight").narrow(0, start, length)

    return part_of
