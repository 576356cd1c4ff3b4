"""HASS: EAGLE-1's network, trained in the context it will meet (Zhang et al. 2025, arXiv:2408.15766).

Two changes to EAGLE-1 (eagle1.py), none to its network or tensor names:
  harmonised context alignment (their 3.2): n passes. Pass j reads the output of pass j - 1 at the column before, and
  its
    queries see the target's features at all columns but the last j - 1, and the drafter's own features of passes
    1 .. j - 1 there: what decoding sees at draft depth j - 1. No gradient flows through those features into the pass
    before; the keys and values computed from them do learn.
  harmonised objective distillation (their 3.1): + top_k_weight * sum over the K tokens the target finds most likely of
    -p log q, at every pass. K = 10, weight 1, n = 3 in their code.
Their figure moves features to the right under fixed columns; unrolled.py draws the same attention rooted at a column.

Deviations: one backward pass through the mean of all passes' losses instead of one each, the same gradient; passes
weigh step_decay^j, 1 by default as theirs.
"""

from __future__ import annotations

from typing import ClassVar, final

from torch import Tensor

from components.drafts.eagle1 import FeatureDraft
from components.drafts.layers import BlockShape
from components.drafts.row_losses import TOP_K
from components.targets.model import AbstractTarget


@final
class Hass(FeatureDraft):
    """EAGLE-1's network with n passes and the top-K loss."""

    method: ClassVar[str] = "hass"

    def __init__(self, target: AbstractTarget, shape: BlockShape, draft_ids: Tensor, depth: int, fc_bias: bool) -> None:
        super().__init__(target, shape, draft_ids, depth, fc_bias)
        self.num_passes, self.step_decay, self.top_k, self.top_k_weight = 3, 1.0, TOP_K, 1.0
