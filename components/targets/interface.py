"""The interface of a target: rows in, logits and features out, over a KV cache.

Names used everywhere: tokens are x_0, x_1, ...; column t is the position of x_t. A pass over it gives
  logits[t]: the distribution of x_{t+1};
  taps[t]:   concat(HF hidden_states[2], hidden_states[n//2], hidden_states[n-3]) at column t, width 3 * hidden_size;
  last[t]:   the last layer's output BEFORE the final norm, width hidden_size.
Shapes: B = sequences, T = rows of this pass, V = vocabulary, H = hidden size.

Reads a target's shape from its Hugging Face configuration, before any weight is read.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.rope_scaling import rope_scaling_of


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
    rope_scaling: str = ""  # rope_scaling.py; "" where positions are rotated by rope_theta alone

    @property
    def tap_layers(self) -> tuple[int, int, int]:
        """HF hidden_states indices of the EAGLE-3 taps: 2, n//2, n-3 (0 is the embedding)."""
        return (2, self.num_layers // 2, self.num_layers - 3)


class TargetPass(NamedTuple):
    """Outputs of one pass; those not requested are None."""

    logits: Tensor | None  # [B, T, V] float32, or [B, 1, V] of the last row only
    taps: Tensor | None  # [B, T, 3H]
    last: Tensor | None  # [B, T, H], before the final norm


class TreeRows(NamedTuple):
    """Positions and mutual visibility of the rows of a pass that are no chain: a draft tree or a lookahead window.

    Row i always sees all cached columns of its sequence, and must see itself.
    """

    depths: Tensor  # int64 [B, T], on the CPU: row j sits at position lengths[b] + depths[b, j]; the first row's is 0
    visible: Tensor  # bool [B, T, T], on the CPU: row i (second axis) sees row j (third axis) of this pass


class AbstractCache(ABC):
    """Keys and values of B sequences, allocated once. `lengths[b]` rows of sequence b are valid."""

    lengths: Tensor  # [B] int64, on the CPU
    capacity: int
    takes_others: bool = True  # whether `put` works: not where layers keep a window or a state instead of all columns

    @abstractmethod
    def put(self, sequences: Sequence[int], other: AbstractCache) -> None:
        """Replace these sequences by those of `other` (of the same target), in order. Rows are copied."""

    @abstractmethod
    def truncate(self, lengths: Tensor) -> None:
        """Drop rows at and beyond lengths[b] (int64 [B]); nothing is moved or freed."""

    @abstractmethod
    def keep(self, start: Tensor, rows: Sequence[Sequence[int]]) -> None:
        """After a pass with TreeRows: keep these of the rows appended since start[b], in this order, drop the others.

        start: int64 [B], the lengths before the pass. rows: for each sequence ascending row numbers of the pass; row
        rows[b][i] becomes column start[b] + i, which must be the position it was computed at.
        """

    @abstractmethod
    def select(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order; rows are moved."""

    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence takes, over all layers."""


class AbstractTarget(ABC):
    """A causal LM ready to decode. Load one with `targets.load.open_target`."""

    shape: TargetShape
    folder: Path | None = None  # of the checkpoint it was opened from
    device: torch.device
    dtype: torch.dtype
    kernel: str  # of its linear layers: see load.open_target

    @abstractmethod
    def new_cache(self, batch_size: int, capacity: int) -> AbstractCache:
        """An empty cache for `batch_size` sequences of at most `capacity` tokens each."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        """Append rows to the cache and return their outputs.

        ids: int64 [B, T]; row j of sequence b is column cache.lengths[b] + j.
        num_valid: int64 [B]; rows at and beyond num_valid[b] are padding: cache.lengths does not count them and their
            outputs are undefined ("last" is then row num_valid[b] - 1). None: all rows count.
        features: also return taps and last.
        tree: positions and mutual visibility of the rows, when they are no chain. The cache must then be told which
            rows to `keep` (or be truncated to where it was) before the next pass.
        """

    @abstractmethod
    def final_norm(self, last: Tensor) -> Tensor:
        """The target's final norm, [..., H] -> [..., H]."""

    @abstractmethod
    def unembed(self, normed: Tensor) -> Tensor:
        """The target's LM head, [..., H] -> [..., V] float32."""

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """The token embedding matrix [V, H]."""


_POSITIVE = (
    *("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
_LARGEST = 1 << 31
_MAX_LAYERS = 10_000
MIN_LAYERS = 7
"""Fewest layers for which the taps 2, n//2 and n-3 are three different layers before the last."""


def shape_of(config: Any, location: str, *, tapped: bool = True) -> TargetShape:
    """Read a transformers configuration; raises UserError (naming `location`) for one that Draftsmith cannot work with.

    tapped: whether feature taps are needed, which takes MIN_LAYERS layers.
    """
    try:
        shape = _shape_of(config.get_text_config(decoder=True), location, tapped)
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        message = " ".join(str(error).split())[:160]
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


def _shape_of(config: Any, location: str, tapped: bool) -> TargetShape:
    architecture = (config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{location}: {architecture} has an encoder; Draftsmith needs a decoder-only causal LM")
    num_layers = int(config.num_hidden_layers)
    if tapped and (num_layers < MIN_LAYERS or len({2, num_layers // 2, num_layers - 3}) < 3):
        raise UserError(
            f"{location}: {num_layers} layers; the three feature taps (2, n//2, n-3) need at least {MIN_LAYERS}; "
            "choose a deeper model"
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"} or sliding_window(config):
        raise UserError(
            f"{location}: {architecture} uses {sorted(layer_types)} or a sliding window; only full attention works"
        )
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    return TargetShape(
        architecture=architecture,
        model_type=str(config.model_type),
        num_layers=num_layers,
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        vocab_size=int(config.vocab_size),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_theta=float(rope_parameters(config).get("rope_theta", 10000.0)),
        max_position_embeddings=int(config.max_position_embeddings),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        bos_token_id=config.bos_token_id,
        eos_token_ids=as_ids(config.eos_token_id),
        pad_token_id=config.pad_token_id,
        rope_scaling=rope_scaling_of(rope_parameters(config), getattr(config, "partial_rotary_factor", None)),
    )


def kv_bytes_per_token(config: Any, itemsize: int) -> int:
    """Bytes one token takes in the KV cache over all layers; itemsize: bytes of one number.

    Multi-head and grouped-query attention: 2 n h_kv d. Multi-head latent attention (DeepSeek-V2/V3; transformers caches
    the compressed latent and the shared rotary key): n (kv_lora_rank + qk_rope_head_dim).
    """
    config = config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) and hasattr(config, "qk_rope_head_dim"):
        numbers = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        numbers = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(config.num_hidden_layers * numbers * itemsize)


def rope_parameters(config: Any) -> dict[str, Any]:
    """The rotary settings, under either of their two names."""
    return dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})


def sliding_window(config: Any) -> bool:
    """Whether any layer uses sliding-window attention."""
    return bool(getattr(config, "use_sliding_window", getattr(config, "sliding_window", None) is not None))


def as_ids(ids: int | list[int] | None) -> tuple[int, ...]:
    """eos_token_id may be absent, one id or several."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
