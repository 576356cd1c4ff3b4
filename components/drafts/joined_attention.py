"""Attention whose softmax runs over one causal block and a few extra keys of each row, without a score matrix.

Over block scores s_j and extra scores r_i of a row, L = log(sum_j e^{s_j} + sum_i e^{r_i}). A flash kernel gives the
block's mix o and l = log sum_j e^{s_j}, so that
  out = e^{l - L} o + sum_i e^{r_i - L} v_i.
Going back, the gradient of a score is e^{s - L} (d.v - d.out) for a gradient d of `out`: the flash kernel's own formula
if it gets the joint `out` and L in place of the block's. So nothing of size R x T is stored, where the plain form
stores two such matrices a step (Dao 2023, arXiv:2307.08691, section 2.3, has the formula for one block).

CPU only: the kernel behind torch's scaled_dot_product_attention is called directly, since only it returns l.
Shapes: B sequences, G key/value heads, g query heads to each, R rows, T columns, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
