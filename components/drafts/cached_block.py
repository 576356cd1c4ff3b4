"""One decoder block at decoding speed: fused projections, a static key/value cache, rotary tables made once.

At one row a small drafter is bound by the number of operations, not by arithmetic, so this path counts them: one linear
for q, k and v, one for gate and up, one attention call, no mask for a single row, and nothing is ever moved or grown.
Only the last row is finished when only the last row is wanted; earlier rows need no more than their keys and values.

Shapes: T rows of one sequence, A attention heads, G key/value heads, D head size, H hidden size.
"""

from __future__ import annotations

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from components.drafts.layers import AttentionProjections, BlockShape, RmsNorm, SwiGlu, rope_tables
from components.targets.linear import Linear

TABLE_LIMIT_BYTES = 64 * 2**20  # token tables above this are computed row by row instead


class KvCache(NamedTuple):
    """Keys and values of one sequence, allocated once; row = column."""

    keys: Tensor  # [G, capacity, D]
    values: Tensor  # [G, capacity, D]


def linear_kernel(weight: Tensor) -> Linear:
    """x -> x @ weight.T for a frozen weight [out, in]; `calibrate` then gives all layers of a drafter their kernels."""
    return Linear(weight.contiguous())


def normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@final
class TokenTable:
    """What a token contributes to a linear layer: norm(embedding) @ weight.T, looked up when a table of it is small.

    The token half of a concatenated input does not depend on the context, so for small vocabularies it is computed once
    for every token and a draft step saves the lookup, the norm, the concatenation and half of the linear layer.
    """

    def __init__(self, embedding: Tensor, norm: RmsNorm, weight: Tensor, dtype: torch.dtype) -> None:
        """embedding: [V, H]; weight: [out, H]."""
        self.embedding, self.weight, self.eps = embedding, weight.to(dtype), norm.eps
        self.norm_weight = norm.weight.detach().to(dtype)
        self.table: Tensor | None = None
        if embedding.shape[0] * weight.shape[0] * self.weight.element_size() <= TABLE_LIMIT_BYTES:
            self.table = self._rows(embedding)

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, out]."""
        if self.table is not None:
            return self.table.index_select(0, ids)
        return self._rows(self.embedding.index_select(0, ids))

    def _rows(self, embedded: Tensor) -> Tensor:
        return F.linear(normalise(embedded.to(self.weight.dtype), self.norm_weight, self.eps), self.weight)


@final
class CachedBlock:
    """Attention and SwiGLU of one block over a KvCache; the method feeds it projected rows."""

    def __init__(
        self, shape: BlockShape, attention: AttentionProjections, post_norm: RmsNorm, mlp: SwiGlu, dtype: torch.dtype
    ) -> None:
        def frozen(*weights: Tensor) -> Tensor:
            return torch.cat([w.detach() for w in weights]).to(dtype)

        self.shape, self.dtype = shape, dtype
        self.device = attention.o_proj.weight.device
        self.qkv_weight = frozen(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.output = linear_kernel(frozen(attention.o_proj.weight))
        self.post_norm = frozen(post_norm.weight)
        self.gate_up = linear_kernel(frozen(mlp.gate_proj.weight, mlp.up_proj.weight))
        self.down = linear_kernel(frozen(mlp.down_proj.weight))
        self.cos = self.sin = torch.empty(0)

    @property
    def linears(self) -> list[Linear]:
        """The block's linear layers in the order they run."""
        return [self.output, self.gate_up, self.down]

    def new_cache(self, capacity: int) -> KvCache:
        """An empty cache of `capacity` rows; also makes the rotary tables long enough."""
        if self.cos.shape[0] < capacity:
            cos, sin = rope_tables(self.shape, torch.arange(capacity, device=self.device))
            self.cos, self.sin = cos.to(self.dtype).unsqueeze(1), sin.to(self.dtype).unsqueeze(1)  # [capacity, 1, D]
        size = (self.shape.num_key_value_heads, capacity, self.shape.head_dim)
        return KvCache(*(torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(2)))

    def run(self, qkv: Tensor, residual: Tensor, cache: KvCache, start: int, last_only: bool) -> Tensor:
        """Write rows start.. of the cache and return the block's output for them, [T, H], or [1, H] for the last row.

        qkv: [T, (A + 2G) * D], not yet rotated; residual: [T, H].
        """
        shape, num_rows = self.shape, qkv.shape[0]
        heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        end = start + num_rows
        rows = qkv.view(num_rows, heads + 2 * kv_heads, size)
        rotating = rows[:, : heads + kv_heads]
        rotated = torch.addcmul(rotating * self.cos[start:end], rotating.roll(size // 2, -1), self.sin[start:end])
        cache.keys[:, start:end] = rotated[:, heads:].transpose(0, 1)
        cache.values[:, start:end] = rows[:, heads + kv_heads :].transpose(0, 1)
        keys, values = cache.keys[None, :, :end], cache.values[None, :, :end]
        if last_only or num_rows == 1:
            # A single row sees every key, so the heads that share a key head become its query rows: no mask, no repeat.
            queries = rotated[-1, :heads].view(1, kv_heads, shape.group, size)
            mixed = F.scaled_dot_product_attention(queries, keys, values).reshape(1, heads * size)
            residual = residual[-1:]
        else:
            last_seen = torch.arange(start, end, device=qkv.device)[:, None]
            mask = torch.arange(end, device=qkv.device) <= last_seen
            queries = rotated[:, :heads].transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
            mixed = mixed[0].transpose(0, 1).reshape(num_rows, heads * size)
        hidden = self.output.add_to(residual, mixed)
        gate, up = self.gate_up(normalise(hidden, self.post_norm, shape.rms_norm_eps)).chunk(2, -1)
        return self.down.add_to(hidden, F.silu(gate) * up)
