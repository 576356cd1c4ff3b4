"""The attention of one P-EAGLE layer in training: true columns, and mask rows of every depth (p_eagle.py)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from components.drafts.causal_mask import CausalMask
from components.drafts.layers import BlockShape, Rope, attend_visible
from components.drafts.unrolled import BlockParts, attend, select_rows


@final
class LayerRows:
    """One layer's attention: true columns, and mask rows of every depth, the depths side by side in one tensor.

    Shapes: B sequences, T columns, R roots, M = all mask rows of a sequence, A heads, D head size.
    """

    def __init__(
        self, shape: BlockShape, layer: BlockParts, inputs: Tensor, rows: Tensor, widths: list[int], causal: CausalMask
    ) -> None:
        """inputs: what q, k, v read at the columns, [B, T, in]; rows: int64 [B, R]; widths: see PEagle.draft_logits."""
        self.shape, self.attention, self.inputs, self.rows, self.widths = shape, layer.self_attn, inputs, rows, widths
        self.positions, self.visible = causal.at(rows), causal.visible
        self.rope = Rope(shape, causal.positions)
        self.keys, self.values = self.attention.keys_values(inputs, self.rope)
        self.masked_columns = causal.masked_columns(rows)  # [B, 1, 1, R, T]

    def mixed_at_columns(self) -> Tensor:
        """Every column over those up to itself: [B, A, T, D]."""
        return attend_visible(self.attention.queries(self.inputs, self.rope), self.keys, self.values, self.visible)

    def mixed_at_roots(self) -> Tensor:
        """The roots only: [B, A, R, D]."""
        queries = self.attention.queries(select_rows(self.inputs, self.rows), Rope(self.shape, self.positions))
        return attend(self.shape, queries, self.keys, self.values, self.masked_columns, [])

    def mixed_at_masks(self, inputs: Tensor) -> Tensor:
        """The mask rows over the columns up to their root and the shallower rows of their own root: [B, A, M, D]."""
        widths = self.widths[1:]
        positions = [self.positions[:, :width] + d for d, width in enumerate(widths, start=1)]
        rope = Rope(self.shape, torch.cat(positions, 1))
        keys, values = (part.split(widths, 2) for part in self.attention.keys_values(inputs, rope))
        queries = self.attention.queries(inputs, rope).split(widths, 2)
        mixed = []
        for i, width in enumerate(widths):
            shallower = [(keys[j][:, :, :width], values[j][:, :, :width]) for j in range(i + 1)]
            masked = self.masked_columns[..., :width, :]
            mixed.append(attend(self.shape, queries[i], self.keys, self.values, masked, shallower))
        return torch.cat(mixed, 2)
