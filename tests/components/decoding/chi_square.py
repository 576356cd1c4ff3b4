"""A chi-square test of drawn tokens against a distribution."""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB = 6


LEVEL = 1e-4  # the chance that a right rule fails a test; seeds are fixed, so it fails always or never


def chi_square_p_value(counts: Tensor, probs: Tensor) -> float:
    """The chance of a Pearson statistic at least this large under `probs` (degrees of freedom: cells - 1)."""
    expected = probs.double() * counts.sum()
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    freedom = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
