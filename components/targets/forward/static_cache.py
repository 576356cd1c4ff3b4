"""A KV cache of all layers in one tensor, allocated once and written in place; and attention over it.

The cache keeps every column. A layer with a window of w positions reads only the columns that the pass's rows can see,
and masks what is further back than w - 1. Long passes over a window run in blocks of rows, so that neither time nor
masks grow with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from components.targets.forward.attention import MOST_ROWS, attend_rows, can_attend
from components.targets.interface import AbstractCache, TreeRows


class StaticCache(AbstractCache):
    """Keys and values [layers, B, 2 * kv_heads, capacity, head_dim]: keys are the first kv_heads, values the rest."""

    def __init__(self, kv: Tensor) -> None:
        self.kv = kv
        self.capacity = kv.shape[3]
        self.lengths = torch.zeros(kv.shape[1], dtype=torch.int64)

    @torch.inference_mode()
    def put(self, sequences: Sequence[int], other: AbstractCache) -> None:
        assert isinstance(other, StaticCache) and len(sequences) == len(other.lengths)
        longest = int(other.lengths.max())
        assert longest <= self.capacity, f"{longest} columns do not fit a cache of {self.capacity}"
        places = torch.tensor(list(sequences))
        self.kv[:, places.to(self.kv.device), :, :longest] = other.kv[:, :, :, :longest]
        self.lengths = self.lengths.index_copy(0, places, other.lengths)

    def truncate(self, lengths: Tensor) -> None:
        assert bool((lengths <= self.lengths).all()) and bool((lengths >= 0).all())
        self.lengths = lengths.clone()

    @torch.inference_mode()
    def keep(self, start: Tensor, rows: Sequence[Sequence[int]]) -> None:
        """As AbstractCache; columns that are in place already are not touched."""
        for sequence, (begin, kept_rows) in enumerate(zip(start.tolist(), rows, strict=True)):
            moved = next((place for place, row in enumerate(kept_rows) if row != place), len(kept_rows))
            if moved < len(kept_rows):
                from_columns = torch.tensor([begin + row for row in kept_rows[moved:]], device=self.kv.device)
                columns = self.kv[:, sequence].index_select(2, from_columns)
                self.kv[:, sequence, :, begin + moved : begin + len(kept_rows)] = columns
        self.lengths = start + torch.tensor([len(kept_rows) for kept_rows in rows])

    @torch.inference_mode()
    def select(self, sequences: Sequence[int]) -> None:
        """As AbstractCache; rows that keep their order move to the front in place: a copy is a second cache."""
        order = list(sequences)
        if order == sorted(set(order)):
            for place, sequence in enumerate(order):
                if place != sequence:
                    self.kv[:, place] = self.kv[:, sequence]
            self.kv = self.kv[:, : len(order)]
        else:
            self.kv = self.kv[:, order]
        self.lengths = self.lengths[order]

    def bytes_per_token(self) -> int:
        return self.kv[:, 0, :, 0].numel() * self.kv.element_size()


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


def view_of_chain(num_rows: int, start: int, window: int, like: Tensor, *, materialises: bool) -> View:
    """Rows at columns start, start + 1, ... of every sequence; materialises: their scores are held as a whole."""
    if start + num_rows <= window:
        window = 0
    first = max(0, start - window + 1) if window else 0
    if num_rows > BLOCK and (window or materialises):
        return View(first, in_blocks=True, start=start - first, window=window)
    if num_rows == 1 or (start == 0 and not window):
        return View(first, is_causal=num_rows > 1)
    return View(first, chain_mask(num_rows, start - first, window, like))


def mask_of(view: View, num_rows: int, like: Tensor) -> Tensor | None:
    """The view's mask [T, S] or [B, 1, T, S], also of rows that are the first of their sequences."""
    return chain_mask(num_rows, 0, 0, like) if view.is_causal else view.mask


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
    visible = keys <= rows
    return View(first, additive(visible & (keys > rows - window) if window else visible, like))


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


class Scoring(NamedTuple):
    """Scores of q . k: times `scale` (None: 1 / sqrt(d)), capped by `cap` (0: not), beside `sinks`, float32 [heads]."""

    scale: float | None = None
    cap: float = 0.0
    sinks: Tensor | None = None

    @property
    def materialises(self) -> bool:
        """Whether scores are held as a whole, since no kernel of PyTorch caps them or knows sinks."""
        return bool(self.cap) or self.sinks is not None


def attend(queries: Tensor, keys: Tensor, values: Tensor, view: View, scoring: Scoring) -> Tensor:
    """Attention of queries [B, T, heads, d] over keys and values [B, kv_heads, S, d] from column view.first on.

    The result is contiguous, [B, T, heads * d]. Fewer heads of queries than kv_heads divide are an error.
    """
    batch, num_rows, heads, size = queries.shape
    if num_rows <= MOST_ROWS and not scoring.cap and can_attend(queries.device, queries.dtype, size):
        mask, scale, sinks = mask_of(view, num_rows, queries), scoring.scale or size**-0.5, scoring.sinks
        return attend_rows(queries, keys, values, mask, first=view.first, scale=scale, sinks=sinks).flatten(2)
    rows = queries.transpose(1, 2)
    # The CPU's kernel reads keys and values once per row of queries: fold each group of heads into rows.
    grouped = queries.device.type == "cpu" and batch > 1 and num_rows == 1
    if grouped:
        rows = rows.reshape(batch, keys.shape[1], -1, size)
    attended = _attend_many(rows, keys, values, view, scoring)
    if grouped:
        attended = attended.reshape(batch, heads, 1, size)
    return attended.transpose(1, 2).reshape(batch, num_rows, -1)


def _attend_many(queries: Tensor, keys: Tensor, values: Tensor, view: View, scoring: Scoring) -> Tensor:
    """As `attend`, of and to [B, heads, T, d], by PyTorch's operators."""
    mask, scale, has_groups = view.mask, scoring.scale, queries.shape[1] != keys.shape[1]
    materialises = scoring.materialises
    if not (materialises or view.in_blocks):
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=view.is_causal, scale=scale, enable_gqa=has_groups
        )
    if not view.in_blocks:
        return _attend_by_scores(queries, keys, values, mask_of(view, queries.shape[2], queries), scoring)
    parts = []
    for begin in range(0, queries.shape[2], BLOCK):
        rows = queries[:, :, begin : begin + BLOCK]
        start, num_rows = view.start + begin, rows.shape[2]
        first = max(0, start - view.window + 1) if view.window else 0
        columns = slice(first, start + num_rows)
        mask = chain_mask(num_rows, start - first, view.window, queries)
        near_keys, near_values = keys[:, :, columns], values[:, :, columns]
        if materialises:
            parts.append(_attend_by_scores(rows, near_keys, near_values, mask, scoring))
        else:
            parts.append(
                F.scaled_dot_product_attention(rows, near_keys, near_values, mask, scale=scale, enable_gqa=has_groups)
            )
    return torch.cat(parts, dim=2)


def _attend_by_scores(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """As `attend`, with all scores at once."""
    batch, heads, num_rows, head_dim = queries.shape
    kv_heads, scale, sinks = keys.shape[1], scoring.scale or head_dim**-0.5, scoring.sinks
    groups = queries.reshape(batch, kv_heads, -1, head_dim)  # the heads that share keys, as rows
    scores = torch.matmul(groups, keys.transpose(2, 3))
    scores = scores.mul_(scale / scoring.cap).tanh_().mul_(scoring.cap) if scoring.cap else scores.mul_(scale)
    if mask is not None:
        scores = scores.view(batch, heads, num_rows, -1).add_(mask).view(scores.shape)
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, kv_heads, -1, 1)
        of_row = sinks.expand(batch, -1, -1, groups.shape[2] * kv_heads // sinks.numel())
        scores = torch.cat([scores, of_row.reshape(batch, kv_heads, -1, 1)], dim=3)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype)
    shares = shares if sinks is None else shares[..., :-1]
    return torch.matmul(shares, values).view(batch, heads, num_rows, head_dim)


def tree_mask(lengths: Tensor, tree: TreeRows, stop: int, like: Tensor) -> Tensor:
    """The additive mask of a tree's rows over columns 0 .. stop-1: [B, 1, T, stop], 0 or -inf.

    Columns below lengths[b] (int64 [B]) are cached; row j of the pass is column lengths[b] + j.
    """
    num_sequences, num_rows = tree.depths.shape
    mask, hidden = torch.zeros(num_sequences, 1, num_rows, stop, dtype=like.dtype), ~tree.visible
    for sequence, start in enumerate(lengths.tolist()):
        mask[sequence, 0, :, start : start + num_rows].masked_fill_(hidden[sequence], -math.inf)
        if start + num_rows < stop:
            mask[sequence, 0, :, start + num_rows :] = -math.inf
    return mask.to(like.device)


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """An attention mask of the dtype and device of `like`: 0 where visible, else -inf."""
    return torch.zeros(visible.shape, dtype=like.dtype).masked_fill_(~visible, -math.inf).to(like.device)
