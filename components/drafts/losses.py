"""What a drafter learns from: the target's own distribution, column by column and step by step.

Soft-target cross-entropy -sum_v p(v) log q(v) (EAGLE-3, Li et al. 2025, arXiv:2503.01840; equal to the KL divergence up
to the teacher's entropy, which has no gradient). Steps are weighted decay^k / sum decay^k: dividing by the sum keeps
the effective learning rate when the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from components.drafts.draft import Batch, StepLosses
from components.drafts.masks import packed_rows, reachable
from components.targets.model import AbstractTarget

Normaliser = Literal["token", "sequence", "position"]


class Teacher(NamedTuple):
    """The target's next-token distribution at every column, over the N tokens that the student's softmax runs over."""

    probs: Tensor  # [B, T, N] float32, renormalised over those tokens
    best: Tensor  # [B, T] int64: which of them greedy decoding keeps (argmax of the FULL vocabulary); -1: none of them


@torch.no_grad()
def teacher_of(target: AbstractTarget, last: Tensor, student_ids: Tensor | None) -> Teacher:
    """The teacher from last-layer outputs [B, T, H], before the final norm.

    student_ids: int64 [N], the target ids of the student's vocabulary; None: all V.
    """
    with torch.autocast(last.device.type, enabled=False):
        logits = target.unembed(target.final_norm(last.to(target.dtype))).float()
    best = logits.argmax(-1)
    if student_ids is None:
        return Teacher(logits.softmax(-1), best)
    places = torch.full((logits.shape[-1],), -1, device=best.device)
    places[student_ids] = torch.arange(student_ids.numel(), device=best.device)
    return Teacher(logits.index_select(-1, student_ids).softmax(-1), places[best])


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


def step_losses(
    batch: Batch,
    steps: Callable[[Tensor], Iterable[Tensor]],
    num_steps: int,
    teacher: Teacher,
    decay: float,
    normaliser: Normaliser,
) -> StepLosses:
    """Losses and counts of every drafting step of one training forward.

    steps: given rows int64 [B, R] (the columns to draft from), the teacher-forced logits [B, R, N] of steps 0, 1, ...
    Step k at column t is judged against the target's distribution at column t + k + 1. It is trained on where M_k
    allows it and the student can say the teacher's argmax, and counts as accepted when steps 0..k all guessed that
    argmax.
    """
    reached = reachable(batch.mask, num_steps)
    rows, valid = packed_rows(reached[0])
    sequence = torch.arange(len(rows), device=rows.device)[:, None]
    losses, accepted, counts = [], [], []
    alive = valid
    for k, logits in enumerate(steps(rows)):
        judged = (rows + k + 1).clamp(max=batch.ids.shape[1] - 1)
        allowed = reached[k].gather(1, rows) & valid
        best = teacher.best.gather(1, judged)
        row_losses = soft_cross_entropy(logits, teacher.probs[sequence, judged])
        losses.append(averaged(row_losses, allowed & (best >= 0), normaliser, batch.ids.numel()))
        # The logit at the teacher's argmax is the largest: the same as comparing argmaxes, at a tenth of the time.
        said = logits.detach().gather(-1, best.clamp(min=0)[..., None])[..., 0] >= logits.detach().amax(-1)
        alive = alive & said & (best >= 0)
        accepted.append((alive & allowed).sum())
        counts.append(allowed.sum())
    stacked = torch.stack(losses)
    weights = decay ** torch.arange(len(losses), device=stacked.device, dtype=torch.float32)
    total = (stacked * weights).sum() / weights.sum()
    return StepLosses(total, stacked.detach(), torch.stack(accepted), torch.stack(counts))
