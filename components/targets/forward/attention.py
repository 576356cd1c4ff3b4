"""Attention over a static cache: what the rows of a pass see, for layers that look at all positions or at a window.

The cache keeps every column. A layer with a window of w positions reads only the columns that the pass's rows can see,
and masks what is further back than w - 1. Long passes over a window run in blocks of rows, so that neither time nor
masks grow with the square of the length.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from components.targets.forward.static_cache import additive, tree_mask
from components.targets.interface import TreeRows

BLOCK: Final = 256
"""Rows of a pass that attend at once where they run in blocks."""


class View(NamedTuple):
    """What the rows of a pass see of the cache in layers of one window: columns `first` to the last one, masked.

    in_blocks: rows are a chain from column `start` on, and attend BLOCK at a time, masked by window.
    """

    first: int
    mask: Tensor | None = None  # [T, S] or [B, 1, T, S], 0 or -inf
    is_causal: bool = False
    in_blocks: bool = False
    start: int = 0
    window: int = 0


def view_of_chain(num_rows: int, start: int, window: int, like: Tensor, *, is_capped: bool) -> View:
    """Rows at columns start, start + 1, ... of every sequence; is_capped: their scores are, which takes all of them."""
    if start + num_rows <= window:
        window = 0
    first = max(0, start - window + 1) if window else 0
    if num_rows > BLOCK and (window or is_capped):
        return View(first, in_blocks=True, start=start - first, window=window)
    if num_rows == 1 or (start == 0 and not window):
        return View(first, is_causal=num_rows > 1)
    return View(first, chain_mask(num_rows, start - first, window, like))


def chain_mask(num_rows: int, start: int, window: int, like: Tensor) -> Tensor:
    """The additive mask [T, start + T] of rows at columns start, start + 1, ...; window 0: all columns before."""
    mask = like.new_zeros(num_rows, start + num_rows)
    mask.narrow(1, start, num_rows).fill_(-math.inf).triu_(1)
    behind = start - window  # row i does not see columns up to i + behind
    if window and behind + num_rows > 0:
        columns = mask.narrow(1, 0, behind + num_rows)
        columns.masked_fill_(torch.ones_like(columns, dtype=torch.bool).tril_(behind), -math.inf)
    return mask


def view_of_columns(columns: Tensor, stop: int, window: int, like: Tensor) -> View:
    """Rows at columns int64 [B, T] on the CPU, of a cache of which columns below `stop` are read."""
    first = max(0, int(columns[:, 0].min()) - window + 1) if window else 0
    keys, rows = torch.arange(first, stop), columns[:, None, :, None]
    seen = keys <= rows
    return View(first, additive(seen & (keys > rows - window) if window else seen, like))


def view_of_tree(lengths: Tensor, tree: TreeRows, stop: int, window: int, like: Tensor) -> View:
    """Rows of trees behind lengths[b] (int64 [B]) cached columns."""
    mask = tree_mask(lengths, tree, stop, like)
    rows = lengths[:, None] + tree.depths
    if not window or int(rows.max()) < window:
        return View(0, mask)
    positions = torch.arange(stop).repeat(len(lengths), 1)
    positions.scatter_(1, lengths[:, None] + torch.arange(rows.shape[1]), rows)
    behind = positions[:, None, None, :] <= rows[:, None, :, None] - window
    first = max(0, int(lengths.min()) - window + 1)
    return View(first, mask.masked_fill_(behind.to(mask.device), -math.inf)[..., first:])


def attend(queries: Tensor, keys: Tensor, values: Tensor, view: View, scale: float | None, cap: float) -> Tensor:
    """Attention of queries [B, heads, T, d] over keys and values [B, kv_heads, S, d] from column view.first on.

    Fewer heads of queries than kv_heads divide are an error. scale: of q . k, None: 1 / sqrt(d); cap: Architecture's.
    """
    if not view.in_blocks:
        return _attend(queries, keys, values, view.mask, view.is_causal, scale, cap)
    parts = []
    for begin in range(0, queries.shape[2], BLOCK):
        rows = queries[:, :, begin : begin + BLOCK]
        start, num_rows = view.start + begin, rows.shape[2]
        first = max(0, start - view.window + 1) if view.window else 0
        columns = slice(first, start + num_rows)
        mask = chain_mask(num_rows, start - first, view.window, queries)
        parts.append(_attend(rows, keys[:, :, columns], values[:, :, columns], mask, False, scale, cap))
    return torch.cat(parts, dim=2)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    cap: float,
) -> Tensor:
    if not cap:
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
    batch, heads, num_rows, head_dim = queries.shape
    if is_causal:
        mask = chain_mask(num_rows, 0, 0, queries)
    groups = queries.reshape(batch, keys.shape[1], -1, head_dim)  # the heads that share keys, as rows
    scores = torch.matmul(groups, keys.transpose(2, 3)).mul_((scale or head_dim**-0.5) / cap).tanh_().mul_(cap)
    if mask is not None:
        scores = scores.view(batch, heads, num_rows, -1).add_(mask).view(scores.shape)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
    return torch.matmul(shares, values).view(batch, heads, num_rows, head_dim)
