"""The training-time test of a one-block drafter over selected columns (EAGLE-3, arXiv:2503.01840; HASS, 2408.15766).

In relative columns: step k at column t is fed x_{t+1+k} and step k-1's output at column t, sits at rotary position
t + k, and sees step-0 columns <= t plus column t of steps 1..k. So the mask is [causal | I | I | ...] and the later
blocks are diagonals: one score a step instead of a T x T block, joined in one softmax. HASS describes the same in
absolute columns (its pass j shifts features right by one); a column of pass j there is a root j columns earlier here.
With a window of W positions step k sees the step-0 columns after t + k - W only, as a cache row at its position does.

That softmax over one causal block and a few extra keys of each row needs no score matrix. Over block scores s_j and
extra scores r_i of a row, L = log(sum_j e^{s_j} + sum_i e^{r_i}). A flash kernel gives the block's mix o and l = log
sum_j e^{s_j}, so that
  out = e^{l - L} o + sum_i e^{r_i - L} v_i.
Going back, the gradient of a score is e^{s - L} (d.v - d.out) for a gradient d of `out`: the flash kernel's own formula
if it gets the joint `out` and L in place of the block's. So nothing of size R x T is stored, where the plain form
stores two such matrices a step (Dao 2023, arXiv:2307.08691, section 2.3, has the formula for one block).

CPU only: the kernel behind torch's scaled_dot_product_attention is called directly, since only it returns l.

Shapes: B sequences, T columns, R selected rows, A heads, G key/value heads, g = A / G, D head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from components.drafts.network.layers import BlockParts, BlockShape, CausalMask, Rope, finish_block


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
        self.draft, self.causal, self.rows, self.positions = draft, causal, rows, causal.at(rows)
        self.hidden = select_rows(features, rows)  # each step's output takes its place
        inputs, _ = draft.attention_inputs(next_ids, features)
        rope = Rope(draft.shape, causal.positions)
        self.keys, self.values = draft.block.self_attn.keys_values(inputs, rope)  # [B, G, T, D]
        self.masked = causal.masked_columns(rows, draft.shape.window)  # [B, 1, 1, R, T]: unseen step-0 columns
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
            if window := draft.shape.window:  # it moves on by a column a step
                self.masked = self.causal.masked_columns(self.rows, window, self.num_steps)
                self.mask = additive_mask(self.masked, draft.shape.group, self.values.dtype)
        mixed = attend(
            draft.shape, attention.queries(inputs, rope), self.keys, self.values, self.masked, self.later, self.mask
        )
        output = finish_block(draft.block, residual, mixed)
        self.hidden = draft.next_step_input(output)
        self.num_steps += 1
        return output


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


_block = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_block_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _JoinedAttention(torch.autograd.Function):
    """extra: the extra keys of the rows, then as many values, [B, G, R, D] each."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *extra: Tensor) -> Tensor:
        num_extra, scale = len(extra) // 2, queries.shape[-1] ** -0.5
        block, block_log = _block(queries.flatten(2, 3), keys, values, 0.0, False, attn_mask=mask, scale=scale)
        block, block_log = block.view_as(queries), block_log.view(queries.shape[:-1])
        scores = [
            (queries * key.unsqueeze(2)).sum(-1).float() * scale for key in extra[:num_extra]
        ]  # [B, G, g, R] each
        joint_log = torch.stack([block_log, *scores]).logsumexp(0)
        out = block * (block_log - joint_log).exp_()[..., None].to(block.dtype)
        for score, value in zip(scores, extra[num_extra:], strict=True):
            out.addcmul_((score - joint_log).exp_()[..., None].to(out.dtype), value.unsqueeze(2))
        ctx.save_for_backward(queries, keys, values, mask, out, joint_log, *extra)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        queries, keys, values, mask, out, joint_log, *extra = ctx.saved_tensors
        num_extra, scale = len(extra) // 2, queries.shape[-1] ** -0.5
        gradient = gradients[0].contiguous()
        rows = (tensor.flatten(2, 3) for tensor in (gradient, queries))
        for_rows, for_keys, for_values = _block_backward(
            *rows, keys, values, out.flatten(2, 3), joint_log.flatten(2, 3), 0.0, False, attn_mask=mask, scale=scale
        )
        for_queries = for_rows.view_as(queries)
        at_out = (gradient * out).sum(-1)  # [B, G, g, R]
        for_extra_keys, for_extra_values = [], []
        for key, value in zip(extra[:num_extra], extra[num_extra:], strict=True):
            share = ((queries * key.unsqueeze(2)).sum(-1).float() * scale - joint_log).exp_().to(gradient.dtype)
            for_score = (share * ((gradient * value.unsqueeze(2)).sum(-1) - at_out) * scale)[..., None]
            for_queries = for_queries.addcmul(for_score, key.unsqueeze(2))
            for_extra_keys.append((for_score * queries).sum(2))
            for_extra_values.append((share[..., None] * gradient).sum(2))
        return for_queries, for_keys, for_values, None, *for_extra_keys, *for_extra_values


def joined_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, extra: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Queries [B, G, g, R, D] over columns [B, G, T, D] and each row's extra keys and values -> [B, G, g, R, D].

    mask: float [B, 1, g R, T], 0 where a row sees a column, else -inf; every row sees at least one column.
    extra: pairs of keys and values [B, G, R, D]. All but the mask are of one dtype.
    """
    flat = (*(key for key, _ in extra), *(value for _, value in extra))
    mixed: Tensor = _JoinedAttention.apply(queries, keys, values, mask, *flat)
    return mixed
