"""One decoder block at decoding speed: fused projections, a static key/value cache, rotary tables made once.

At one row a small drafter is bound by the number of operations, not by arithmetic, so this path keeps them few: one
linear for q, k and v, one for gate and up, one attention call, no mask for a single row, and no cache row is ever
moved. As in targets/forward/llama.py, norm weights and sqrt(H) are folded into the following linear layer, which
leaves x /
sqrt(|x|^2 + H eps), and rows of q and k are permuted so that a rotary pair lies side by side: one complex product.
Where only the last row's output is needed, earlier rows get no more than their keys and values.

Shapes: T rows of one sequence, A attention heads, G key/value heads, D head size, H hidden size; B sequences, W rows of
a draft block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from components.drafts.network.layers import (
    AttentionProjections,
    BlockShape,
    LlamaLayer,
    RmsNorm,
    SwiGlu,
    rope_frequencies,
    rope_size,
)
from components.targets.forward.attention import MOST_ROWS, attend_rows, can_attend
from components.targets.forward.compiled import can_run
from components.targets.forward.layers import LayerEnd
from components.targets.forward.linear import Linear
from components.targets.forward.mlp import Mlp
from components.targets.forward.rows import gated, normed, rotate

TABLE_LIMIT_BYTES = 64 * 2**20  # token tables above this are computed row by row instead
FEW_ROWS = 16  # up to this many new rows, the mask comes from a table

SCRATCH_ROWS = 64  # room for draft tokens after the committed rows of a window; a tree that needs more gets more


@final
class KvCache:
    """Keys and values of one sequence, allocated once: rows [2G, C, D], keys first; row i is column first + i.

    With a window C does not grow with the text. Where the rows are full, those that later columns still see move to the
    front (`CachedBlock.make_room`), once in about a window; between two moves columns stay in order, so that attention
    over them is as without a window.
    """

    def __init__(self, rows: Tensor, num_columns: int) -> None:
        """num_columns: the columns that it may hold in its life."""
        self.rows, self.num_columns, self.first = rows, num_columns, 0

    def write(self, start: int, rows: Tensor) -> None:
        """Rows [T, 2G, D] become columns start.. ."""
        self.rows.narrow(1, start - self.first, rows.shape[0]).copy_(rows.transpose(0, 1))

    def keys_values(self, start: int, end: int) -> Tensor:
        """Columns start .. end - 1: [2G, end - start, D]."""
        return self.rows.narrow(1, start - self.first, end - start)

    def move(self, first: int, end: int) -> None:
        """Let row 0 be column `first`, and keep the columns from there up to `end`."""
        if end > first:
            self.rows[:, : end - first] = self.keys_values(first, end).clone()
        self.first = first


@final
class UnitNorm:
    """RMSNorm without its weight and sqrt(H): x / sqrt(|x|^2 + H eps); `folded` puts both into the next linear."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.scale, self._squared_floor = math.sqrt(size), size * eps
        self._in_one = can_run(device, dtype, size)
        self.floor = torch.tensor(math.sqrt(size * eps), dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H] of length just below 1."""
        if self._in_one:
            return normed(x, None, self._squared_floor)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self.floor)

    def folded(self, weight: Tensor, norm: RmsNorm) -> Tensor:
        """Fold `norm` into the weight [out, H] of the linear layer after it, which then takes this norm's output."""
        return weight.detach() * (norm.weight.detach() * self.scale)


def linear_kernel(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x -> x @ weight.T + bias for a frozen weight [out, in]; `lay_out` then gives a drafter's layers their kernels."""
    return Linear(weight.contiguous(), None if bias is None else bias.to(weight.dtype))


@final
class TokenTable:
    """The contribution of a token to a linear layer: norm(embedding) @ weight.T + bias, tabulated where that is small.

    The token half of a concatenated input does not depend on the context, so for small vocabularies it is computed once
    for every token and a draft step saves the lookup, the norm, the concatenation and half of the linear layer.
    """

    def __init__(
        self, embedding: Tensor, norm: RmsNorm | None, weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        """embedding: [V, H]; norm: None takes the embedding as it is; weight: [out, H]; bias: [out]."""
        self.embedding, self.weight = embedding, weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.norm = None if norm is None else (norm.weight.detach().to(dtype), norm.eps)
        self.table: Tensor | None = None
        if embedding.shape[0] * weight.shape[0] * self.weight.element_size() <= TABLE_LIMIT_BYTES:
            self.table = self._rows(embedding)

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, out]."""
        if self.table is not None:
            return self.table.index_select(0, ids)
        return self._rows(self.embedding.index_select(0, ids))

    def _rows(self, embedded: Tensor) -> Tensor:
        embedded = embedded.to(self.weight.dtype)
        if self.norm is not None:
            embedded = F.rms_norm(embedded, (embedded.shape[-1],), *self.norm)
        return F.linear(embedded, self.weight, self.bias)


def last_rows(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The last row of each sequence, [B, H], of rows [T, H], counts[b] of each sequence, sequence after sequence."""
    return rows[-1:] if len(counts) == 1 else rows[[end - 1 for end in accumulate(counts)]]


@final
class CachedBlock:
    """Attention and SwiGLU of one block over a KvCache; the method feeds it projected rows."""

    def __init__(
        self, shape: BlockShape, attention: AttentionProjections, post_norm: RmsNorm, mlp: SwiGlu, dtype: torch.dtype
    ) -> None:
        """Lays out all but `qkv_weight`, [(A + 2G) * D, in] float32: the method folds its own input norm into that."""
        self.shape, self.dtype = shape, dtype
        self.device = attention.o_proj.weight.device
        self.norm = UnitNorm(shape.hidden_size, shape.rms_norm_eps, dtype, self.device)
        queries, keys = (self._interleave_pairs(part.weight.detach()) for part in (attention.q_proj, attention.k_proj))
        self.qkv_weight = torch.cat((queries, keys, attention.v_proj.weight.detach()))
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        self.output = linear_kernel(attention.o_proj.weight.detach().to(dtype))
        self.gate_up = linear_kernel(self.norm.folded(gate_up, post_norm).to(dtype))
        self.down = linear_kernel(mlp.down_proj.weight.detach().to(dtype))
        self.head_norms = self._head_norms(attention)
        self._attends = can_attend(self.device, dtype, shape.head_dim)
        self._in_one = can_run(self.device, dtype, shape.head_dim, shape.intermediate_size)
        for linear in self.linears:
            linear.in_one = self._in_one and can_run(self.device, dtype, shape.hidden_size)
        self.rotations = self.masks = torch.empty(0)

    @property
    def linears(self) -> list[Linear]:
        """The block's linear layers in the order they run."""
        return [self.output, self.gate_up, self.down]

    @functools.cached_property
    def _end(self) -> LayerEnd | None:
        """What follows attention as one function of our own, where there is one; asked when all is laid out."""
        if not self.output.in_one:
            return None
        return LayerEnd(self.output, Mlp(self.gate_up, self.down, "silu"), None, self.shape.rms_norm_eps)

    def new_cache(self, capacity: int, num_layers: int = 1) -> KvCache:
        """An empty cache for `capacity` columns; also makes the tables long enough.

        num_layers: as `make_room`; with a window there are rows for what layers above see of new columns, no more.
        """
        num_rows = min(capacity, (num_layers + 1) * self.shape.window + SCRATCH_ROWS) if self.shape.window else capacity
        self._lengthen_tables(capacity, num_rows)
        size = (2 * self.shape.num_key_value_heads, num_rows, self.shape.head_dim)
        return KvCache(torch.zeros(size, dtype=self.dtype, device=self.device), capacity)

    def _lengthen_tables(self, num_columns: int, num_rows: int) -> None:
        """Rotations of as many columns, and masks over as many rows of a cache."""
        if self.rotations.shape[0] < num_columns:
            angles = torch.arange(num_columns, device=self.device)[:, None] * rope_frequencies(self.shape, self.device)
            sizes = torch.full_like(angles, rope_size(self.shape))
            self.rotations = torch.polar(sizes, angles).unsqueeze(1)  # [num_columns, 1, D / 2]
        if self.masks.shape[-1] < 2 * num_rows:
            # Row i of FEW_ROWS new rows sees the columns up to its own: a window of this band, wherever they begin.
            ahead = torch.arange(2 * num_rows, device=self.device) - num_rows
            row = torch.arange(FEW_ROWS, device=self.device)[:, None]
            hidden = ahead > row
            if self.shape.window:
                hidden |= ahead <= row - self.shape.window
            self.masks = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)

    def with_room(self, cache: KvCache, end: int) -> None:
        """Give the cache room for the columns below `end` (a tree has one row per node)."""
        if end <= cache.first + cache.rows.shape[1]:
            return
        before, num_rows = cache.rows, end - cache.first + FEW_ROWS
        self._lengthen_tables(end + FEW_ROWS, num_rows)
        cache.rows = before.new_zeros(before.shape[0], num_rows, before.shape[2])
        cache.rows[:, : before.shape[1]] = before

    def make_room(self, cache: KvCache, start: int, num_new: int, num_layers: int = 1) -> int:
        """Before columns start .. start + num_new - 1 are committed: how many of them, the first, nobody will see.

        With a window older rows make room, and of a long text only what the last column depends on is to be written.
        num_layers: layers of this drafter that read each other at the columns; 1 where keys and values of a column
        depend on its own input alone.
        """
        if not (window := self.shape.window):
            return 0
        skipped = max(0, num_new - num_layers * (window - 1) - 1)
        if skipped:
            cache.move(start + skipped, start)
        elif start + num_new + SCRATCH_ROWS > cache.first + cache.rows.shape[1]:
            cache.move(max(cache.first, start + 1 - window), start)
        return skipped

    def run(self, qkv: Tensor, residual: Tensor, cache: KvCache, start: int, last_only: bool) -> Tensor:
        """Write columns start.. of the cache; the block's output for them: [T, H], or [1, H] with last_only.

        qkv: [T, (A + 2G) * D], not yet rotated, and not needed afterwards; residual: [T, H].
        """
        return self._finish(residual[-1:] if last_only else residual, self._mix(qkv, cache, start, last_only))

    def run_each(
        self,
        qkv: Tensor,
        residual: Tensor,
        caches: Sequence[KvCache],
        starts: Sequence[int],
        counts: Sequence[int],
        last_only: bool = True,
    ) -> Tensor:
        """Run new rows of B sequences; return the output of each sequence's last row, [B, H], or of every row, [T, H].

        qkv [T, ...] and residual [T, H] as in `run`, counts[b] rows of each sequence, sequence after sequence; they
        become columns starts[b].. of caches[b]. Weights are read once; attention runs per sequence.
        """
        if len(caches) == 1:
            return self.run(qkv, residual, caches[0], starts[0], last_only)
        each = zip(qkv.split(counts), caches, starts, strict=True)
        mixed = [self._mix(rows, cache, start, last_only) for rows, cache, start in each]
        return self._finish(last_rows(residual, counts) if last_only else residual, torch.cat(mixed))

    def _mix(self, qkv: Tensor, cache: KvCache, start: int, last_only: bool) -> Tensor:
        """Write columns start.. of one sequence; what each of its rows attends to, [T, A * D], or the last one."""
        shape, num_rows = self.shape, qkv.shape[0]
        heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        rows = qkv.view(num_rows, heads + 2 * kv_heads, size)
        self._write(rows, self.rotations.narrow(0, start, num_rows), cache, start)
        first = self._first_seen(cache, start + num_rows - 1 if last_only else start)
        keys, values = cache.keys_values(first, start + num_rows).unsqueeze(0).split(kv_heads, 1)
        if last_only or num_rows == 1:
            return self._attend(rows[-1:], keys, values, None, first)
        return self._attend(rows, keys, values, self._mask(start - first, num_rows), first)

    def _first_seen(self, cache: KvCache, column: int) -> int:
        """The first column that a column sees: with a window, those before it are not even read."""
        return max(cache.first, column + 1 - self.shape.window) if self.shape.window else 0

    def _write(self, rows: Tensor, rotations: Tensor, cache: KvCache, start: int) -> None:
        """Rotate queries and keys of rows [T, A + 2G, D]; keys and values become columns start.. of the cache."""
        shape = self.shape
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        if self._in_one:
            slots = cache.keys_values(start, start + rows.shape[0]).unsqueeze(0)
            floor = shape.head_dim * shape.rms_norm_eps
            rotate(rows.unsqueeze(0), kv_heads, self.head_norms, floor, rotations, slots)
        else:
            self._rotate(rows.narrow(1, 0, heads + kv_heads), rotations)
            cache.write(start, rows.narrow(1, heads, 2 * kv_heads))

    def _attend(self, rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """Attention of rotated rows [T, A + 2G, D] over columns first.. of a cache: [T, A * D].

        keys, values: [1, G, C, D]; mask: [T, C], or None where every row sees every column.
        """
        queries, num_rows = rows.narrow(1, 0, self.shape.num_attention_heads).unsqueeze(0), rows.shape[0]
        if self._attends and num_rows <= MOST_ROWS and (mask is None or mask.dtype == rows.dtype):
            scale = self.shape.head_dim**-0.5
            mixed = attend_rows(queries, keys, values, mask, first=first, scale=scale, sinks=None)
        elif num_rows == 1 and mask is None:
            # A single row sees every key, so the heads that share a key head become its query rows: no mask, no repeat.
            queries = queries.view(1, keys.shape[1], self.shape.group, -1)
            mixed = F.scaled_dot_product_attention(queries, keys, values)
        else:
            queries = queries.transpose(1, 2)
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            mixed = mixed.transpose(1, 2)
        return mixed.reshape(num_rows, -1)

    def run_at(self, qkv: Tensor, residual: Tensor, cache: Tensor, at: Tensor, first: Tensor, window: int) -> Tensor:
        """As `run` for every row, with all indices on the device, so that a CUDA graph can capture it.

        cache: the rows of a KvCache. at: int64 [T] on the device, the cache row that each row is written to; first:
        int64 [1], the column of row 0. A row sees those of the first `window` cache rows that are not after its own.
        """
        shape, num_rows = self.shape, qkv.shape[0]
        heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        rows = qkv.view(num_rows, heads + 2 * kv_heads, size)
        self._rotate(rows.narrow(1, 0, heads + kv_heads), self.rotations.index_select(0, at + first))
        cache.index_copy_(1, at, rows.narrow(1, heads, 2 * kv_heads).transpose(0, 1))
        keys, values = cache.narrow(1, 0, window).unsqueeze(0).split(kv_heads, 1)
        cached = torch.arange(window, device=at.device)
        visible = cached <= at[:, None]
        if self.shape.window:
            visible &= cached > at[:, None] - self.shape.window
        return self._finish(residual, self._attend(rows, keys, values, visible, 0))

    def run_branches(
        self,
        qkv: Tensor,
        residual: Tensor,
        cache: KvCache,
        start: int,
        positions: Sequence[int],
        visible: Tensor,
    ) -> Tensor:
        """Write the rows of a tree as columns start.. of the cache; the block's output for the last R, [R, H].

        qkv, residual: as in `run`. positions: T rotary positions.
        visible: bool [R, C], which of the last C columns each of the last R rows sees; it sees all earlier ones,
        with a window those of them inside it.
        """
        shape, num_rows, (num_last, num_visible) = self.shape, qkv.shape[0], visible.shape
        heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        end = start + num_rows - cache.first  # rows of the cache in use
        rows = qkv.view(num_rows, heads + 2 * kv_heads, size)
        rotations = self.rotations.index_select(0, torch.tensor(positions, device=self.device))
        self._write(rows, rotations, cache, start)
        keys, values = cache.rows.narrow(1, 0, end).unsqueeze(0).split(kv_heads, 1)
        mask = torch.zeros(num_last, end, dtype=self.dtype, device=self.device)
        mask.narrow(1, end - num_visible, num_visible).masked_fill_(~visible.to(self.device), -math.inf)
        if self.shape.window:
            oldest = torch.tensor(positions[num_rows - num_last :], device=self.device)[:, None] - self.shape.window
            oldest -= cache.first
            earlier = torch.arange(end - num_visible, device=self.device)
            mask.narrow(1, 0, end - num_visible).masked_fill_(earlier <= oldest, -math.inf)
        mixed = self._attend(rows[num_rows - num_last :], keys, values, mask, cache.first)
        return self._finish(residual[num_rows - num_last :], mixed)

    def _finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The block after attention: residual [T, H], mixed [T, A * D] -> [T, H]."""
        if self._end is not None and residual.shape[0] in self._end.rows:
            return self._end(residual, mixed)
        hidden = self.output.add_to(residual, mixed)
        gate_up = self.gate_up(self.norm(hidden))
        if self._in_one:
            return self.down.add_to(hidden, gated(gate_up, "silu"))
        gate, up = gate_up.chunk(2, -1)
        return self.down.add_to(hidden, F.silu(gate).mul_(up))

    def _rotate(self, rows: Tensor, rotations: Tensor) -> None:
        """Rotate [T, A + G, D], or keys [T, G, D], in place by complex64 [T, 1, D / 2]; norms of theirs come first."""
        exact = rows if rows.dtype == torch.float32 else rows.float()
        if self.head_norms is not None:
            exact.copy_(
                F.rms_norm(exact, exact.shape[-1:], eps=self.shape.rms_norm_eps).mul_(self.head_norms[-rows.shape[1] :])
            )
        torch.view_as_complex(exact.unflatten(-1, (-1, 2))).mul_(rotations)
        if exact is not rows:
            rows.copy_(exact)

    def _mask(self, start: int, num_rows: int) -> Tensor:
        """Additive causal mask, [T, start + T]: 0 where row i, at column start + i, may attend, else -inf."""
        end = start + num_rows
        if num_rows <= FEW_ROWS:
            middle = self.masks.shape[1] // 2
            return self.masks[:num_rows, middle - start : middle - start + end]
        every = torch.ones(num_rows, end, dtype=torch.bool, device=self.device)
        hidden = every.triu(start + 1)
        if self.shape.window:
            hidden |= every.tril_(start - self.shape.window)
        return torch.zeros(num_rows, end, dtype=self.dtype, device=self.device).masked_fill_(hidden, -math.inf)

    def _head_norms(self, attention: AttentionProjections) -> Tensor | None:
        """The norms' weights of every query and key, [A + G, D], in the order of rotary pairs; None without norms."""
        if attention.q_norm is None or attention.k_norm is None:
            return None
        heads = [(attention.q_norm, self.shape.num_attention_heads), (attention.k_norm, self.shape.num_key_value_heads)]
        weights = [self._interleave_pairs(norm.weight.detach().float()[:, None])[:, 0] for norm, _ in heads]
        return torch.cat([weight.expand(count, -1) for weight, (_, count) in zip(weights, heads, strict=True)])

    def _interleave_pairs(self, weight: Tensor) -> Tensor:
        """Reorder the rows of a projection [heads * D, in] to (0, D/2, 1, D/2 + 1, ...) within every head."""
        half = self.shape.head_dim // 2
        return weight.view(-1, 2, half, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


@final
class InjectedBlock:
    """A LlamaLayer whose keys and values of committed positions are the target's features (DFlash).

    Cache rows of committed positions are written once, from fused features; the rows after them belong to the draft
    block of the round. Its W rows see each other and all that is committed, with a window the last so many of them, so
    there is no mask, and what a round leaves behind is overwritten by the next.
    """

    def __init__(self, shape: BlockShape, layer: LlamaLayer, context_norm: RmsNorm, dtype: torch.dtype) -> None:
        """context_norm: the norm of the features before they become keys and values."""
        block = self.block = CachedBlock(shape, layer.self_attn, layer.post_attention_layernorm, layer.mlp, dtype)
        self.shape, num_queries = shape, shape.num_attention_heads * shape.head_dim
        self.context_weight = block.norm.folded(block.qkv_weight[num_queries:], context_norm).to(dtype)  # [2G D, H]
        self.qkv = linear_kernel(block.norm.folded(block.qkv_weight, layer.input_layernorm).to(dtype))

    @property
    def linears(self) -> list[Linear]:
        """The block's linear layers in the order they run."""
        return [self.qkv, *self.block.linears]

    def commit(self, keys_values: Tensor, cache: KvCache, start: int) -> None:
        """Write T newly committed positions as columns start.. of the cache; they are not needed afterwards.

        keys_values: [T, 2G D], the normed features by context_weight.
        """
        kv_heads, num_rows = self.shape.num_key_value_heads, keys_values.shape[0]
        rows = keys_values.view(num_rows, 2 * kv_heads, self.shape.head_dim)
        self.block._rotate(rows.narrow(1, 0, kv_heads), self.block.rotations.narrow(0, start, num_rows))
        cache.write(start, rows)

    def run(self, residual: Tensor, caches: Sequence[KvCache], starts: Sequence[int]) -> Tensor:
        """Denoise B draft blocks: residual [B W, H] -> [B W, H]; block b is at columns starts[b].. ."""
        shape = self.shape
        heads, kv_heads, width = shape.num_attention_heads, shape.num_key_value_heads, residual.shape[0] // len(caches)
        qkv = self.qkv(self.block.norm(residual)).unflatten(-1, (heads + 2 * kv_heads, shape.head_dim))
        mixed = []
        for rows, cache, start in zip(qkv.split(width), caches, starts, strict=True):
            self.block._write(rows, self.block.rotations.narrow(0, start, width), cache, start)
            first = max(cache.first, start - shape.window) if shape.window else 0
            keys, values = cache.keys_values(first, start + width).unsqueeze(0).split(kv_heads, 1)
            mixed.append(self.block._attend(rows, keys, values, None, first))
        return self.block._finish(residual, torch.cat(mixed))
