"""The building blocks of a drafter's training graph: norm, Llama attention projections, SwiGLU, rotary tables.

Parameter names are those of Hugging Face Llama (`self_attn.q_proj.weight`, `mlp.gate_proj.weight`, ...), so a state
dict needs no renaming on its way to a serving engine. Decoding runs the same weights through the leaner
`cached_block.py`.

Shapes: B sequences, T columns, A attention heads, G key/value heads, D head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.training_linear import TrainingLinear
from components.targets.model import AbstractTarget

INIT_STD = 0.02  # Llama's initializer_range


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one decoder block; heads and rotary base are the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def of(cls, target: AbstractTarget, intermediate_size: int) -> BlockShape:
        """The block that fits a target; intermediate_size 0 takes the target's own.

        A target with latent attention (DeepSeek's MLA) gets a plain grouped-query block of the same head count:
        drafters are free in their attention, and engines serve EAGLE-3 drafts for such targets in the Llama layout.
        """
        shape = target.shape
        head_dim = shape.head_dim
        if head_dim <= 0 or head_dim % 2:  # rotary pairs need an even head
            head_dim = 2 * max(1, shape.hidden_size // (2 * shape.num_attention_heads))
        return cls(
            hidden_size=shape.hidden_size,
            intermediate_size=intermediate_size or shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
        )

    @property
    def group(self) -> int:
        """Attention heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads


@final
class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 whatever comes in (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # One kernel each way: written out, the norms took a tenth of a training step and kept four copies of x.
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


@final
class AttentionProjections(nn.Module):
    """q, k, v and o projections of grouped-query attention; the method computes the attention itself."""

    def __init__(self, shape: BlockShape, in_features: int) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = TrainingLinear(in_features, queries)
        self.k_proj = TrainingLinear(in_features, keys)
        self.v_proj = TrainingLinear(in_features, keys)
        self.o_proj = TrainingLinear(queries, shape.hidden_size)

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[B, T, in] -> [B, A, T, D], rotated."""
        return rope.rotate(self.q_proj(x).unflatten(-1, (self.shape.num_attention_heads, -1)).transpose(1, 2))

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[B, T, in] -> rotated keys and values, [B, G, T, D] each."""
        heads = (self.shape.num_key_value_heads, -1)
        keys = rope.rotate(self.k_proj(x).unflatten(-1, heads).transpose(1, 2))
        return keys, self.v_proj(x).unflatten(-1, heads).transpose(1, 2)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, A, T, D] -> [B, T, H]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def attend_visible(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Attention over visible columns: queries [B, A, T, D], keys and values [B, G, T, D] -> [B, A, T, D].

    visible: bool [B, 1, T, T]; None: every column up to itself. In the dtype of the values.
    """
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )


@final
class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = TrainingLinear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = TrainingLinear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = TrainingLinear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@final
class LlamaLayer(nn.Module):
    """A Llama decoder layer with Llama's tensor names."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionProjections(shape, shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGlu(shape)

    def forward(self, x: Tensor, rope: Rope, visible: Tensor | None = None) -> Tensor:
        """All columns at once, causal or masked by `visible`: [B, T, H] -> [B, T, H]."""
        normed = self.input_layernorm(x)
        keys, values = self.self_attn.keys_values(normed, rope)
        mixed = attend_visible(self.self_attn.queries(normed, rope), keys, values, visible)
        hidden = x + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@final
class Rope:
    """Rotary positions for a fixed set of rows (Su et al. 2021, arXiv:2104.09864; halves layout of HF Llama).

    cos, sin: [..., 1, T, D] broadcast over heads; sin carries the sign of the rotated half, so that
    rotate(x) = x * cos + roll(x, D/2) * sin.
    """

    def __init__(self, shape: BlockShape, positions: Tensor) -> None:
        """positions: int64 [T] or [B, T]."""
        cos, sin = rope_tables(shape, positions)
        self.cos, self.sin = cos.unsqueeze(-3), sin.unsqueeze(-3)

    def rotate(self, x: Tensor) -> Tensor:
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


def rope_tables(shape: BlockShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sign-carrying sin of positions [...]: float32 [..., D] each."""
    angles = positions.float().unsqueeze(-1) * rope_frequencies(shape, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rope_frequencies(shape: BlockShape, device: torch.device) -> Tensor:
    """Angle per position of every rotary pair, radians: float32 [D / 2]."""
    exponents = torch.arange(shape.head_dim // 2, dtype=torch.float32, device=device) * 2 / shape.head_dim
    return shape.rope_theta**-exponents


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Every linear weight from N(0, 0.02^2), every norm weight 1; the same seed gives the same drafter."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=INIT_STD, generator=generator)
        elif isinstance(part, RmsNorm):
            nn.init.ones_(part.weight)
