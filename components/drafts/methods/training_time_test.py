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

Rows are taken a stretch at a time, each over the columns that it can see, so that masks do not grow with R x T either.
On a CPU the kernel behind torch's scaled_dot_product_attention is called directly, since only it returns l; elsewhere
the scores of a stretch are computed by matrix products, once forwards and once backwards. Both are deterministic.

Shapes: B sequences, T columns, R selected rows, A heads, G key/value heads, g = A / G, D head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor

from components.drafts.network.layers import BlockParts, BlockShape, CausalMask, Rope, Sight, finish_block
from components.drafts.network.recompute import of_block


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
        self.sight = Sight(causal, rows, draft.shape.window)  # of the step-0 columns
        self.later: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..k at the rows, [B, G, R, D]
        self.num_steps = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Feed x_{t+1+k}, int64 [B, R]; returns the block's output [B, R, H]."""
        draft, number, later = self.draft, self.num_steps, tuple(self.later)
        if number and (window := draft.shape.window):  # it moves on by a column a step
            self.sight = Sight(self.causal, self.rows, window, number)
        sight = self.sight

        def run(hidden: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
            inputs, residual = draft.attention_inputs(tokens, hidden)
            attention, rope = draft.block.self_attn, Rope(draft.shape, self.positions + number)
            new = (attention.keys_values(inputs, rope),) if number else ()
            mixed = attend(draft.shape, attention.queries(inputs, rope), keys, values, sight, (*later, *new))
            return finish_block(draft.block, residual, mixed), new

        output, new = of_block(run, self.hidden, self.keys, self.values)
        self.later += new
        self.hidden = draft.next_step_input(output)
        self.num_steps += 1
        return output


def attend(
    shape: BlockShape,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sight: Sight,
    later: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """One softmax over the columns that a row sees and the row's own later steps, in the dtype of the values.

    queries: [B, A, R, D]; keys, values: [B, G, T, D]; later: keys and values of each later step at the rows, [B, G, R,
    D]. Returns [B, A, R, D].
    """
    grouped, dtype = queries.unflatten(1, (shape.num_key_value_heads, shape.group)), values.dtype
    extra = [(key.to(dtype), value.to(dtype)) for key, value in later]
    return joined_attention(grouped.to(dtype), keys.to(dtype), values, sight, extra).flatten(1, 2)


def select_rows(columns: Tensor, rows: Tensor) -> Tensor:
    """Select the rows int64 [B, R] of columns [B, T, H]: [B, R, H]."""
    return columns.gather(1, rows[..., None].expand(-1, -1, columns.shape[-1]))


class BlockKernel(NamedTuple):
    """Attention of rows [B, G, M, D] over columns [B, G, T, D] under an additive mask [B, 1, M, T]."""

    mix: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(queries, keys, values, mask) -> the mix [B, G, M, D] and the log-sum-exp of the scores, float32 [B, G, M]"""
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(gradient, queries, keys, values, mix, log-sum-exp, mask) -> the gradients of queries, keys and values"""


def _flash(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    kernel, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, queries.shape[-1] ** -0.5
    mix, log = kernel(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    return mix, log


def _flash_gradients(gradient: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kernel, scale = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, gradient.shape[-1] ** -0.5
    for_queries, for_keys, for_values = kernel(gradient, *parts[:-1], 0.0, False, attn_mask=parts[-1], scale=scale)
    return for_queries, for_keys, for_values


def _scores(queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    return (queries @ keys.transpose(-1, -2)).float().mul_(queries.shape[-1] ** -0.5).add_(mask)


def _products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = _scores(queries, keys, mask)
    log = scores.logsumexp(-1)
    return scores.sub_(log[..., None]).exp_().to(values.dtype) @ values, log


def _product_gradients(gradient: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values, mix, log, mask = parts
    shares = _scores(queries, keys, mask).sub_(log[..., None]).exp_()
    for_values = shares.to(gradient.dtype).transpose(-1, -2) @ gradient
    at_mix = (gradient * mix).sum(-1, keepdim=True)
    for_scores = (gradient @ values.transpose(-1, -2)).float().sub_(at_mix).mul_(shares)
    for_scores = for_scores.mul_(queries.shape[-1] ** -0.5).to(gradient.dtype)
    return for_scores @ keys, for_scores.transpose(-1, -2) @ queries, for_values


KERNELS = {"cpu": BlockKernel(_flash, _flash_gradients), "any": BlockKernel(_products, _product_gradients)}
"""By kind of device."""


class _JoinedAttention(torch.autograd.Function):
    """extra: the extra keys of the rows, then as many values, [B, G, R, D] each."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, sight: Sight, kernel: BlockKernel, *extra: Tensor
    ) -> Tensor:
        num_extra, group, scale = len(extra) // 2, queries.shape[2], queries.shape[-1] ** -0.5
        outs, logs = [], []
        for rows, columns in sight.stretches(group):
            of_rows = queries[:, :, :, rows]
            mask = sight.mask(rows, columns, group, queries.dtype)
            block, block_log = kernel.mix(of_rows.flatten(2, 3), keys[:, :, columns], values[:, :, columns], mask)
            block, block_log = block.reshape(of_rows.shape), block_log.reshape(of_rows.shape[:-1])
            scores = [
                (of_rows * key[:, :, None, rows]).sum(-1).float() * scale for key in extra[:num_extra]
            ]  # [B, G, g, R] each
            joint_log = torch.stack([block_log, *scores]).logsumexp(0)
            out = block * (block_log - joint_log).exp_()[..., None].to(block.dtype)
            for score, value in zip(scores, extra[num_extra:], strict=True):
                out.addcmul_((score - joint_log).exp_()[..., None].to(out.dtype), value[:, :, None, rows])
            outs.append(out)
            logs.append(joint_log)
        out, joint_log = joined(outs, 3), joined(logs, 3)
        ctx.save_for_backward(queries, keys, values, out, joint_log, *extra)
        ctx.sight, ctx.kernel = sight, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        queries, keys, values, out, joint_log, *extra = ctx.saved_tensors
        num_extra, group, scale = len(extra) // 2, queries.shape[2], queries.shape[-1] ** -0.5
        gradient, sight = gradients[0].contiguous(), ctx.sight
        stretches = sight.stretches(group)
        sums: list[Tensor] = []  # of keys and values: in float32, as each column gets a part from many stretches
        if len(stretches) > 1:
            sums = [torch.zeros_like(part, dtype=torch.float32) for part in (keys, values)]
        for_queries, for_extra = [], []
        for rows, columns in stretches:
            of_rows, towards, mixed = queries[:, :, :, rows], gradient[:, :, :, rows], out[:, :, :, rows]
            log, mask = joint_log[:, :, :, rows], sight.mask(rows, columns, group, queries.dtype)
            visible = (keys[:, :, columns], values[:, :, columns])
            flat = (towards.flatten(2, 3), of_rows.flatten(2, 3), *visible, mixed.flatten(2, 3), log.flatten(2, 3))
            for_rows, *for_seen = ctx.kernel.gradients(*flat, mask)
            if sums:
                for total, part in zip(sums, for_seen, strict=True):
                    total[:, :, columns] += part
            else:
                sums = for_seen
            for_rows, at_out = for_rows.reshape(of_rows.shape), (towards * mixed).sum(-1)  # [B, G, g, R]
            for_own_keys, for_own_values = [], []
            for own_key, own_value in zip(extra[:num_extra], extra[num_extra:], strict=True):
                key, value = own_key[:, :, None, rows], own_value[:, :, None, rows]
                share = ((of_rows * key).sum(-1).float() * scale - log).exp_().to(towards.dtype)
                for_score = (share * ((towards * value).sum(-1) - at_out) * scale)[..., None]
                for_rows = for_rows.addcmul(for_score, key)
                for_own_keys.append((for_score * of_rows).sum(2))
                for_own_values.append((share[..., None] * towards).sum(2))
            for_queries.append(for_rows)
            for_extra.append([*for_own_keys, *for_own_values])
        of_extra = (joined(parts, 2) for parts in zip(*for_extra, strict=True))
        for_keys, for_values = (total.to(keys.dtype) for total in sums)
        return joined(for_queries, 3), for_keys, for_values, None, None, *of_extra


def joined(stretches: Sequence[Tensor], axis: int) -> Tensor:
    """The rows of every stretch in one tensor."""
    return stretches[0] if len(stretches) == 1 else torch.cat(tuple(stretches), axis)


def joined_attention(
    queries: Tensor, keys: Tensor, values: Tensor, sight: Sight, extra: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Queries [B, G, g, R, D] over columns [B, G, T, D] and each row's extra keys and values -> [B, G, g, R, D].

    sight: of the R rows; every row sees at least one column. extra: pairs of keys and values [B, G, R, D]. All are of
    one dtype.
    """
    flat = (*(key for key, _ in extra), *(value for _, value in extra))
    kernel = KERNELS.get(queries.device.type, KERNELS["any"])
    mixed: Tensor = _JoinedAttention.apply(queries, keys, values, sight, kernel, *flat)
    return mixed
