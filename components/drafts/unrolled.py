"""The training-time test of a one-block drafter over selected columns (EAGLE-3, arXiv:2503.01840; HASS, 2408.15766).

In relative columns: step k at column t is fed x_{t+1+k} and step k-1's output at column t, sits at rotary position
t + k, and sees step-0 columns <= t plus column t of steps 1..k. So the mask is [causal | I | I | ...] and the later
blocks are diagonals: one score a step instead of a T x T block, joined in one softmax. HASS describes the same in
absolute columns (its pass j shifts features right by one); a column of pass j there is a root j columns earlier here.

Shapes: B sequences, T columns, R selected rows, A heads, G key/value heads, g = A / G, D head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from components.drafts.causal_mask import CausalMask
from components.drafts.joined_attention import joined_attention
from components.drafts.layers import AttentionProjections, BlockShape, RmsNorm, Rope, SwiGlu


class BlockParts(Protocol):
    """The tensors shared by all such blocks; their input layers differ."""

    self_attn: AttentionProjections
    post_attention_layernorm: RmsNorm
    mlp: SwiGlu


class OneBlock(Protocol):
    """A drafter with one block."""

    shape: BlockShape

    @property
    def block(self) -> BlockParts:
        """The block's tensors."""

    def attention_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids [..., T] and hidden inputs [..., T, H] -> the input of q, k, v [..., in] and the residual."""

    def next_step_input(self, output: Tensor) -> Tensor:
        """The hidden input of the next step, in place of the target's features: [..., H] -> [..., H]."""


@final
class Unrolled:
    """Step 0 for all keys, then one diagonal a step."""

    def __init__(
        self, draft: OneBlock, features: Tensor, next_ids: Tensor, rows: Tensor, causal: CausalMask | None = None
    ) -> None:
        """features: [B, T, H], input of step 0; next_ids: int64 [B, T], x_{t+1}; rows: int64 [B, R], the roots.

        causal: positions and visibility of the columns; None: a document each row.
        """
        causal = CausalMask(next_ids.shape[1], rows.device) if causal is None else causal
        self.draft, self.positions = draft, causal.at(rows)
        self.hidden = select_rows(features, rows)  # each step's output takes its place
        inputs, _ = draft.attention_inputs(next_ids, features)
        rope = Rope(draft.shape, causal.positions)
        self.keys, self.values = draft.block.self_attn.keys_values(inputs, rope)  # [B, G, T, D]
        self.masked = causal.masked_columns(rows)  # [B, 1, 1, R, T]: step-0 columns after the row
        self.mask = additive_mask(self.masked, draft.shape.group, self.values.dtype)
        self.later: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..k at the rows, [B, G, R, D]
        self.num_steps = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Feed x_{t+1+k}, int64 [B, R]; returns the block's output [B, R, H]."""
        draft, attention = self.draft, self.draft.block.self_attn
        inputs, residual = draft.attention_inputs(tokens, self.hidden)
        rope = Rope(draft.shape, self.positions + self.num_steps)
        if self.num_steps > 0:
            self.later.append(attention.keys_values(inputs, rope))
        mixed = attend(
            draft.shape, attention.queries(inputs, rope), self.keys, self.values, self.masked, self.later, self.mask
        )
        output = finish_block(draft.block, residual, mixed)
        self.hidden = draft.next_step_input(output)
        self.num_steps += 1
        return output


def finish_block(block: BlockParts, residual: Tensor, mixed: Tensor) -> Tensor:
    """The rest of the block after attention: residual [B, R, H], mixed [B, A, R, D] -> [B, R, H]."""
    hidden = residual + block.self_attn.output(mixed)
    return hidden + block.mlp(block.post_attention_layernorm(hidden))


def attend(
    shape: BlockShape,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    masked: Tensor,
    later: Sequence[tuple[Tensor, Tensor]],
    mask: Tensor | None = None,
) -> Tensor:
    """One softmax over the causal columns and the row's own later steps.

    queries: [B, A, R, D]; keys, values: [B, G, T, D]; masked: bool [B, 1, 1, R, T]; later: keys and values of each
    later step at the rows, [B, G, R, D]; mask: `additive_mask` of masked, for callers that reuse it. Returns [B, A, R,
    D].
    """
    grouped = queries.unflatten(1, (shape.num_key_value_heads, shape.group))
    if queries.device.type == "cpu":
        mask = additive_mask(masked, shape.group, values.dtype) if mask is None else mask
        dtype = values.dtype
        extra = [(key.to(dtype), value.to(dtype)) for key, value in later]
        return joined_attention(grouped.to(dtype), keys.to(dtype), values, mask.to(dtype), extra).flatten(1, 2)
    grouped = grouped * shape.head_dim**-0.5
    num_columns, num_rows = keys.shape[2], queries.shape[2]
    causal = (grouped.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (shape.group, num_rows))
    scores = [causal.masked_fill(masked, float("-inf"))]
    scores += [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in later]
    weights = torch.cat(scores, -1).float().softmax(-1).to(values.dtype)  # [B, G, g, R, T + k]
    mixed = (weights[..., :num_columns].flatten(2, 3) @ values).unflatten(2, (shape.group, num_rows))
    for i, (_, value) in enumerate(later):
        mixed = mixed + weights[..., num_columns + i, None] * value.unsqueeze(2)
    return mixed.flatten(1, 2)


def additive_mask(masked: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """-inf where a row does not see a column, else 0: bool [B, 1, 1, R, T] -> [B, 1, g R, T]."""
    mask = torch.zeros(masked.shape[:2] + masked.shape[3:], dtype=dtype, device=masked.device)
    return mask.masked_fill_(masked[:, 0], float("-inf")).repeat(1, 1, group, 1)


def select_rows(columns: Tensor, rows: Tensor) -> Tensor:
    """Select the rows int64 [B, R] of columns [B, T, H]: [B, R, H]."""
    return columns.gather(1, rows[..., None].expand(-1, -1, columns.shape[-1]))
