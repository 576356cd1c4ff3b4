"""Positions and visibility of the columns of a training batch, with one document per row or several packed into it.

Packed documents attend block by block (a column sees the columns of its own document up to itself) and count positions
from their own start, so each is computed as if it were alone. No drafting step may cross a document border: a packed
batch clears the answer mask at every document's first token. Without packing no root reads the mask of that token (M_k
of masks.py looks ahead of its column), so clearing it loses nothing.

Shapes: B rows, T columns, R selected columns of each.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, final

import torch
from torch import Tensor


class Documents(NamedTuple):
    """Which document every column of a packed batch belongs to."""

    numbers: Tensor  # int64 [B, T]: 0, 1, ... over the whole batch; -1 on padding
    positions: Tensor  # int64 [B, T]: columns since the document's first


@final
class CausalMask:
    """Positions and visibility of T columns."""

    def __init__(self, num_columns: int, device: torch.device, documents: Documents | None = None) -> None:
        self.columns = torch.arange(num_columns, device=device)
        self.documents = documents

    @property
    def positions(self) -> Tensor:
        """Rotary positions: int64 [T], or [B, T] where documents are packed."""
        return self.columns if self.documents is None else self.documents.positions

    @functools.cached_property
    def visible(self) -> Tensor | None:
        """Which columns each column sees, bool [B, 1, T, T]; None: every column up to itself (torch's is_causal)."""
        if self.documents is None:
            return None
        numbers = self.documents.numbers
        return ((self.columns <= self.columns[:, None]) & (numbers[:, None] == numbers[..., None]))[:, None]

    def at(self, rows: Tensor) -> Tensor:
        """Positions of the columns rows, int64 [B, R]."""
        return rows if self.documents is None else self.documents.positions.gather(1, rows)

    def masked_columns(self, rows: Tensor) -> Tensor:
        """Which columns the columns rows, int64 [B, R], do not see: bool [B, 1, 1, R, T]."""
        later = self.columns > rows[:, None, None, :, None]
        if self.documents is None:
            return later
        numbers = self.documents.numbers
        return later | (numbers[:, None] != numbers.gather(1, rows)[..., None])[:, None, None]

    def is_first(self, batch_size: int) -> Tensor:
        """Mark the columns at position 0: bool [B, T]."""
        return (self.positions == 0).expand(batch_size, -1)
