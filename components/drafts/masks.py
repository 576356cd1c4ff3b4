"""The columns that are trained at each drafting step: exactly those that decoding can reach.

A proposal rooted at column t drafts x_{t+2}, x_{t+3}, ... after the target's x_{t+1}. Step k (from 0) is fed
x_{t+1+k} and drafts x_{t+2+k}. Decoding reaches it only when the root and all tokens of the chain are answer tokens:
  M_k(t) = prod_{j=1..k+2} m_{t+j}.
Public trainers use m_{t+k} or m_{t+1+k}, which lose the first draft after the prompt or train positions after the end;
the product also stops chains that would straddle two turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH_STEP = 16
"""Widths are multiples of this (see LENGTH_STEP in batches.py): filler rows are cheap, new shapes are not."""


def reachable(mask: Tensor, num_steps: int) -> Tensor:
    """M_0 .. M_{num_steps-1} of an answer mask: bool [B, T] -> bool [num_steps, B, T]; False past the end."""
    length = mask.shape[1]
    padded = torch.nn.functional.pad(mask, (0, num_steps + 1))

    def ahead(j: int) -> Tensor:  # m_{t+j} at every t
        return padded[:, j : j + length]

    masks = [ahead(1) & ahead(2)]
    for k in range(1, num_steps):
        masks.append(masks[-1] & ahead(k + 2))
    return torch.stack(masks)


def shift_left(values: Tensor, by: int) -> Tensor:
    """values[:, t + by] at every t of [B, T]; zeros past the end."""
    return torch.nn.functional.pad(values[:, by:], (0, min(by, values.shape[1])))


def packed_rows(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The selected columns of each sequence, moved to the left: only these are computed.

    selected: bool [B, T]. Returns rows int64 [B, R] (column indices, ascending; R is at least the most that any
    sequence has) and valid bool [B, R] (False on filler rows, which point at column 0).
    """
    counts = selected.sum(1)
    width = min(selected.shape[1], -(-max(1, int(counts.max())) // WIDTH_STEP) * WIDTH_STEP)
    order = selected.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    valid = torch.arange(width, device=selected.device) < counts[:, None]
    return order.masked_fill(~valid, 0), valid
