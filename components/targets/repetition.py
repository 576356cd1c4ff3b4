"""A training loss against loops: each repetition of a piece of text must become less likely, not more.

DITTO (Xu et al. 2022, arXiv:2206.02369, section 3.2): a piece of training text is repeated to the end of a window; for
token l of its n-th occurrence, n >= 1 counted from 0, the loss is -log(1 - |p(n, l) - ratio * p(n - 1, l)|), where p(n,
l) is the token's probability, p(n - 1, l) that of the same token one occurrence earlier, held constant, and `ratio`
their lambda. Untreated language models do the opposite (p grows with n), so greedy text gets stuck.
Deviations: pieces are cut by length in tokens, not at sentence ends, and follow a short prefix of the text before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from components.targets.lean_llama import LeanLlama

ROWS: Final = 4
"""Windows in one forward pass of one process."""

WINDOW_TOKENS: Final = 256
PREFIX_TOKENS: Final = (1, 64)
PIECE_TOKENS: Final = (2, 32)
"""Least and most tokens before the first occurrence, and in the repeated piece."""


@dataclass(frozen=True)
class Loops:
    """Synthetic loops. tokens [rows, window] int64. earlier [rows, window - 1] int64: for the prediction of token t + 1
    the index of the prediction of the same token one occurrence earlier, -1 where there was none."""

    tokens: Tensor
    earlier: Tensor

    def to(self, device: torch.device) -> Loops:
        """A copy on a device."""
        return Loops(self.tokens.to(device), self.earlier.to(device))


def synthetic_loops(stream: np.ndarray, random: np.random.Generator, window: int, rows: int = ROWS) -> Loops:
    """Cut pieces out of a token stream [tokens] and repeat each to the end of its window."""
    tokens, earlier = [], []
    for _ in range(rows):
        prefix = int(random.integers(PREFIX_TOKENS[0], min(PREFIX_TOKENS[1], window // 4) + 1))
        piece = int(random.integers(PIECE_TOKENS[0], min(PIECE_TOKENS[1], window // 4) + 1))
        start = int(random.integers(0, len(stream) - prefix - piece))
        before = stream[start : start + prefix]
        repeated = np.resize(stream[start + prefix : start + prefix + piece], window - prefix)
        tokens.append(np.concatenate((before, repeated)).astype(np.int64))
        position = np.arange(window - 1)  # predicts the token at position + 1
        earlier.append(np.where(position + 1 >= prefix + piece, position - piece, -1))
    return Loops(torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(earlier)))


def repetition_loss(model: LeanLlama, loops: Loops, ratio: float) -> Tensor:
    """Mean of -log(1 - |p - ratio * p one occurrence earlier|) over repeated tokens; scalar, nats per token."""
    targets = loops.tokens[:, 1:, None]
    p = model.logits(loops.tokens[:, :-1]).float().log_softmax(-1).gather(-1, targets)[..., 0].exp()
    repeated = loops.earlier >= 0
    p_earlier = p.detach().gather(1, loops.earlier.clamp_min(0))
    distance = (p - ratio * p_earlier).abs()
    return -torch.log((1.0 - distance).clamp_min(1e-4))[repeated].mean()
