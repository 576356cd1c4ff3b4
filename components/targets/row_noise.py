"""How far logits move when the same tokens are verified in a block instead of one at a time.

Kernels add in another order for another number of rows, so logits differ in their last bits. A greedy decision whose
top-2 margin is within a few times this noise is a tie: either token is the target's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.targets.model import AbstractTarget


def row_count_noise(
    target: AbstractTarget, texts: Sequence[Sequence[int]], *, row_counts: Sequence[int] = (2, 4, 6, 8), prefix: int = 8
) -> float:
    """max |logit difference| between 1-row passes and m-row passes over real token ids.

    texts: token ids of a few real texts; the first `prefix` tokens are prefilled the same way for every m.
    row_counts: the m to compare. Unit: logits (nats before the softmax). 0.0 if every text is too short.
    """
    worst = 0.0
    for text in texts:
        ids = torch.tensor(list(text))[None]
        if ids.shape[1] <= prefix + 1:
            continue
        single = _logits(target, ids, prefix, 1)
        for rows in row_counts:
            worst = max(worst, float((_logits(target, ids, prefix, rows) - single).abs().max()))
    return worst


def _logits(target: AbstractTarget, ids: torch.Tensor, prefix: int, rows: int) -> torch.Tensor:
    cache = target.new_cache(1, ids.shape[1])
    target.forward(ids[:, :prefix], cache, logits="none")
    parts = []
    for part in ids[:, prefix:].split(rows, dim=1):
        logits = target.forward(part, cache).logits
        assert logits is not None
        parts.append(logits)
    return torch.cat(parts, dim=1)
