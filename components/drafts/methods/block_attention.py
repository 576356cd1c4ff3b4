"""Attention of draft blocks in training: a row sees the columns up to its block's root and all rows of its own block.

It is one softmax over both, and blocks do not see each other. The columns are many and the same for all rows of a
block, the own rows few: a flash kernel mixes the columns and gives the log l of their sum, batched products of W x W
scores do the blocks, and with L = log(e^l + sum_j e^{r_j}) of a row's own scores r
  out = e^{l - L} o + sum_j e^{r_j - L} v_j.
Going back, the kernel gets the joint `out` and L, as training_time_test.py has it. Roots ascend, so they are taken some
at a time, and each stretch sees only the columns up to its last root: nothing is computed for later ones.

On a GPU the scores are written out. Shapes: B sequences, T columns, R blocks of W rows, of which the last Q ask; A
heads, G key/value heads, g = A / G, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple, final

import torch
from torch import Tensor

ROWS_AT_ONCE = 512  # of blocks that attend to the same columns at once
COLUMN_STEP = 32

_mix = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_mix_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Stretch(NamedTuple):
    """Some of the blocks and the columns that they see."""

    blocks: slice
    columns: slice
    mask: Tensor  # [B, 1, R' Q, T'], -inf where a row does not see a column, else 0


@final
class BlockSight:
    """What the rows of blocks see of the columns."""

    def __init__(self, masked: Tensor, rows_of_block: int, dtype: torch.dtype) -> None:
        """masked: bool [B, R, T], what a block does not see; every block sees a column. rows_of_block: Q."""
        self.masked, self.rows_of_block = masked, rows_of_block
        num_blocks, num_columns = masked.shape[1:]
        at_once, visible = max(1, ROWS_AT_ONCE // rows_of_block), (~masked).any(0)
        self.stretches = []
        for start in range(0, num_blocks if masked.device.type == "cpu" else 0, at_once):
            blocks = slice(start, min(num_blocks, start + at_once))
            used = visible[blocks].any(0).nonzero()
            first, end = int(used[0]) // COLUMN_STEP * COLUMN_STEP, -(-(int(used[-1]) + 1) // COLUMN_STEP) * COLUMN_STEP
            columns = slice(first, min(num_columns, end))
            unseen = masked[:, blocks, columns].repeat_interleave(rows_of_block, 1)[:, None]
            self.stretches.append(
                Stretch(blocks, columns, torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, float("-inf")))
            )


def attend_blocks(
    queries: Tensor, columns: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], sight: BlockSight
) -> Tensor:
    """Mix the values that the rows of blocks see: queries [B, A, R Q, D] -> [B, A, R Q, D], in the values' dtype.

    columns: keys and values [B, G, T, D]; rows: those of the blocks' rows, [B, G, R W, D]; sight: for Q rows a block.
    """
    num_blocks, dtype = sight.masked.shape[1], columns[1].dtype
    keys, values = (part.to(dtype) for part in columns)
    own_keys, own_values = (part.to(dtype).unflatten(2, (num_blocks, -1))[:, :, None] for part in rows)
    grouped = queries.to(dtype).unflatten(1, (keys.shape[1], -1)).unflatten(3, (num_blocks, -1))  # [B, G, g, R, Q, D]
    if queries.device.type == "cpu":
        mixed: Tensor = _BlockAttention.apply(grouped, keys, values, own_keys, own_values, sight.stretches)
    else:
        mixed = _written_out(grouped, keys, values, own_keys, own_values, sight.masked)
    return mixed.flatten(3, 4).flatten(1, 2)


def _written_out(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, masked: Tensor
) -> Tensor:
    queries = queries * queries.shape[-1] ** -0.5
    scores = (queries.flatten(2, 4) @ keys.transpose(-1, -2)).unflatten(2, queries.shape[2:5])
    scores = scores.masked_fill(masked[:, None, None, :, None], float("-inf"))  # [B, G, g, R, Q, T]
    both = torch.cat((scores, queries @ own_keys.transpose(-1, -2)), -1)
    shares = both.float().softmax(-1).to(values.dtype)
    of_columns, of_own = shares.split((keys.shape[2], own_keys.shape[-2]), -1)
    return (of_columns.flatten(2, 4) @ values).unflatten(2, queries.shape[2:5]) + of_own @ own_values


class _BlockAttention(torch.autograd.Function):
    """queries: [B, G, g, R, Q, D]; keys, values: [B, G, T, D]; own_keys, own_values: [B, G, 1, R, W, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        stretches: list[Stretch],
    ) -> Tensor:
        scale = queries.shape[-1] ** -0.5
        out = torch.empty_like(queries)
        log = queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        for blocks, columns, mask in stretches:
            of_heads = (_of_heads(part[:, :, columns], queries.shape[2]) for part in (keys, values))
            rows = queries[:, :, :, blocks]
            mix, mix_log = _mix(_by_head(rows), *of_heads, 0.0, False, attn_mask=mask, scale=scale)
            out[:, :, :, blocks], log[:, :, :, blocks] = mix.reshape(rows.shape), mix_log.reshape(rows.shape[:-1])
        scores = (queries @ own_keys.transpose(-1, -2)).float() * scale  # [B, G, g, R, Q, W]
        joint_log = torch.logaddexp(log, scores.logsumexp(-1))
        out *= (log - joint_log).exp_()[..., None].to(out.dtype)
        out += (scores - joint_log[..., None]).exp_().to(out.dtype) @ own_values
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, out, joint_log)
        ctx.stretches = stretches
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        queries, keys, values, own_keys, own_values, out, joint_log = ctx.saved_tensors
        scale, gradient = queries.shape[-1] ** -0.5, gradients[0].contiguous()
        shares = ((queries @ own_keys.transpose(-1, -2)).float() * scale - joint_log[..., None]).exp_().to(out.dtype)
        at_out = (gradient * out).sum(-1, keepdim=True)
        for_scores = (gradient @ own_values.transpose(-1, -2)).sub_(at_out).mul_(shares).mul_(scale)
        for_queries = for_scores @ own_keys
        for_own_keys = (for_scores.transpose(-1, -2) @ queries).sum(2, keepdim=True)
        for_own_values = (shares.transpose(-1, -2) @ gradient).sum(2, keepdim=True)
        for_keys, for_values = (torch.zeros_like(part, dtype=torch.float32) for part in (keys, values))
        for blocks, columns, mask in ctx.stretches:
            of_heads = (_of_heads(part[:, :, columns], queries.shape[2]) for part in (keys, values))
            towards, rows, mix = (_by_head(part[:, :, :, blocks]) for part in (gradient, queries, out))
            log = joint_log[:, :, :, blocks].flatten(3, 4).flatten(1, 2)
            of_rows, of_keys, of_values = _mix_backward(
                towards, rows, *of_heads, mix, log, 0.0, False, attn_mask=mask, scale=scale
            )
            for_queries[:, :, :, blocks] += of_rows.reshape(for_queries[:, :, :, blocks].shape)
            for total, part in ((for_keys, of_keys), (for_values, of_values)):
                total[:, :, columns] += part.unflatten(1, (keys.shape[1], -1)).sum(2)
        return for_queries, for_keys.to(keys.dtype), for_values.to(values.dtype), for_own_keys, for_own_values, None


def _by_head(rows: Tensor) -> Tensor:
    """[B, G, g, R, Q, D] -> [B, A, R Q, D]."""
    return rows.flatten(3, 4).flatten(1, 2)


def _of_heads(columns: Tensor, group: int) -> Tensor:
    """[B, G, T, D] -> [B, A, T, D]."""
    return columns.repeat_interleave(group, 1)
