"""What a drafter learns from: the target's own distribution, column by column and step by step.

Soft-target cross-entropy -sum_v p(v) log q(v) (EAGLE-3, Li et al. 2025, arXiv:2503.01840; equal to the KL divergence up
to the teacher's entropy, which has no gradient). Steps are weighted decay^k / sum decay^k: dividing by the sum keeps the
effective learning rate when the number of steps changes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from components.drafts.draft import StepLosses
from components.targets.model import AbstractTarget

Normaliser = Literal["token", "sequence", "position"]


class Teacher(NamedTuple):
    """The target's next-token distribution at every column. N = what the student's softmax runs over."""

    probs: Tensor  # [B, T, N] float32, renormalised over the draft vocabulary
    argmax: Tensor  # [B, T] int64, over the FULL vocabulary: what greedy decoding keeps
    inside: Tensor  # [B, T] bool: that argmax lies in the draft vocabulary


@torch.no_grad()
def teacher_of(target: AbstractTarget, last: Tensor, draft_ids: Tensor | None) -> Teacher:
    """The teacher from last-layer outputs [B, T, H] (before the final norm); draft_ids None keeps all V tokens."""
    with torch.autocast(last.device.type, enabled=False):
        logits = target.unembed(target.final_norm(last.to(target.dtype))).float()
    best = logits.argmax(-1)
    if draft_ids is None:
        return Teacher(logits.softmax(-1), best, torch.ones_like(best, dtype=torch.bool))
    kept = logits.index_select(-1, draft_ids)
    inside = kept.amax(-1) == logits.amax(-1)
    return Teacher(kept.softmax(-1), best, inside)


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) at every row: logits and probs [..., N] -> float32 [...]."""
    logits = logits.float()
    return logits.logsumexp(-1) - (probs * logits).sum(-1)


def averaged(rows: Tensor, wanted: Tensor, normaliser: Normaliser, num_positions: int) -> Tensor:
    """One number from losses [B, R] where wanted [B, R].

    token: mean over wanted rows. sequence: mean over sequences of their means, so that short answers weigh as much as
    long ones. position: sum over the B * T positions of the padded batch, as the first public trainers do.
    """
    kept = rows.masked_fill(~wanted, 0.0)
    if normaliser == "position":
        return kept.sum() / num_positions
    if normaliser == "token":
        return kept.sum() / wanted.sum().clamp(min=1)
    counts = wanted.sum(1)
    return (kept.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


class StepTally:
    """Collects the steps of one training forward into StepLosses.

    A row counts as accepted at step k when steps 0..k all guessed the target's full-vocabulary argmax (prefix-joint).
    """

    def __init__(self, decay: float, normaliser: Normaliser, num_positions: int) -> None:
        self.decay, self.normaliser, self.num_positions = decay, normaliser, num_positions
        self.losses: list[Tensor] = []
        self.accepted: list[Tensor] = []
        self.reached: list[Tensor] = []
        self._alive: Tensor | None = None

    def add(self, rows: Tensor, trained: Tensor, reached: Tensor, right: Tensor) -> None:
        """The next step: losses, rows to train on, rows that M_k allows, rows guessed right; all [B, R]."""
        self._alive = right if self._alive is None else self._alive & right
        self.losses.append(averaged(rows, trained, self.normaliser, self.num_positions))
        self.accepted.append((self._alive & reached).sum())
        self.reached.append(reached.sum())

    def result(self) -> StepLosses:
        losses = torch.stack(self.losses)
        weights = self.decay ** torch.arange(len(losses), device=losses.device, dtype=torch.float32)
        total = (losses * weights).sum() / weights.sum()
        return StepLosses(total, losses.detach(), torch.stack(self.accepted), torch.stack(self.reached))
