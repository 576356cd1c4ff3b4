"""A KV cache of all layers in one tensor, allocated once and written in place; and the attention masks over it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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

    def select(self, sequences: Sequence[int]) -> None:
        self.kv = self.kv[:, list(sequences)]
        self.lengths = self.lengths[list(sequences)]

    def bytes_per_token(self) -> int:
        return self.kv[:, 0, :, 0].numel() * self.kv.element_size()


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
