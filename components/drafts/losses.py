"""The training loss: distances to the target's own distribution, averaged over columns and drafting steps.

The distance at one row is defined in `row_losses.py`. Steps are weighted
decay^k / sum decay^k: dividing by the sum keeps the effective learning rate when the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from components.drafts.draft import Batch, StepLosses
from components.drafts.masks import WIDTH_STEP, packed_rows, reachable
from components.drafts.row_losses import Teacher, row_loss
from components.drafts.settings import LossName
from components.targets.model import AbstractTarget

Normaliser = Literal["token", "sequence", "position"]
TEACHER_COLUMNS = 64


class ColumnTeacher(Protocol):
    """Gives the teacher at columns of a batch: a Teacher over all [B, T], or a SparseTeacher over some."""

    def at(self, rows: Tensor) -> Teacher:
        """The teacher at the columns rows, int64 [B, R]."""


class SparseTeacher(NamedTuple):
    """A teacher over C columns of a batch; at any other column its result is arbitrary."""

    teacher: Teacher  # over [1, C]
    index_of_column: Tensor  # int64 [B, T]: the index of a column among the C

    def at(self, rows: Tensor) -> Teacher:
        index_of_column = self.index_of_column.gather(1, rows)
        return Teacher(
            *(part[0].index_select(0, index_of_column.flatten()).unflatten(0, rows.shape) for part in self.teacher)
        )


def teacher_at_target_columns(target: AbstractTarget, batch: Batch, student_ids: Tensor | None) -> SparseTeacher:
    """Teacher distributions at the columns where the loss is evaluated only.

    Step k of root t is evaluated at t + k + 1, and M_k(t) implies M_0(t + k): so these are the columns after those in
    M_0. A prompt has none.
    """
    is_target = torch.nn.functional.pad(reachable(batch.mask, 1)[0][:, :-1], (1, 0)).flatten()
    columns = is_target.nonzero().squeeze(1)
    width = -(-max(1, len(columns)) // WIDTH_STEP) * WIDTH_STEP
    columns = torch.nn.functional.pad(columns, (0, width - len(columns)))  # the filler is column 0
    index_of_column = (is_target.cumsum(0) - 1).clamp(min=0).view_as(batch.ids)
    return SparseTeacher(
        teacher_distributions(target, batch.last.flatten(0, 1)[columns][None], student_ids), index_of_column
    )


@torch.no_grad()
def teacher_distributions(target: AbstractTarget, last: Tensor, student_ids: Tensor | None) -> Teacher:
    """Compute the teacher from last-layer outputs [B, T, H], before the final norm.

    student_ids: int64 [N], the target ids of the student's vocabulary; None: all V.
    """
    columns = last.to(target.dtype).flatten(0, 1)
    with torch.autocast(last.device.type, enabled=False):
        # A few columns at a time: the logits of all over the full vocabulary would be the largest tensor of the step.
        parts = [_teacher_at(target, chunk, student_ids) for chunk in columns.split(TEACHER_COLUMNS)]
    return Teacher(*(torch.cat(part).unflatten(0, last.shape[:2]) for part in zip(*parts, strict=True)))


def _teacher_at(target: AbstractTarget, columns: Tensor, student_ids: Tensor | None) -> Teacher:
    """Compute the teacher at columns [C, H]."""
    logits = target.unembed(target.final_norm(columns[None]))[0].float()
    best = logits.argmax(-1)
    if student_ids is None:
        return Teacher(logits.softmax(-1), best, torch.ones_like(best, dtype=torch.float32))
    student_index = torch.full((logits.shape[-1],), -1, device=best.device)
    student_index[student_ids] = torch.arange(student_ids.numel(), device=best.device)
    student_logits = logits.index_select(-1, student_ids)
    mass = (student_logits.logsumexp(-1) - logits.logsumexp(-1)).exp()
    return Teacher(student_logits.softmax(-1), student_index[best], mass)


def average_losses(
    losses: Tensor, included: Tensor, normaliser: Normaliser, num_positions: int, sequences: Tensor | None = None
) -> Tensor:
    """Average losses [B, R] over the rows where included, bool [B, R].

    token: mean over included rows. sequence: mean over the means of sequences, so that short answers weigh as much as
    long ones. position: sum divided by the B * T positions of the padded batch, as the first public trainers do.
    sequences: int64 [B, R], the sequence of every row, from 0; None: each b is one sequence.
    """
    masked = losses.masked_fill(~included, 0.0)
    if normaliser == "position":
        return masked.sum() / num_positions
    if normaliser == "token":
        return masked.sum() / included.sum().clamp(min=1)
    if sequences is None:
        sums, counts = masked.sum(1), included.sum(1)
    else:
        sequence_of_row, num_sequences = sequences[included], int(sequences.max()) + 1
        sums = masked.new_zeros(num_sequences).index_add(0, sequence_of_row, losses[included])
        counts = sequence_of_row.bincount(minlength=num_sequences)
    return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


class Roots(NamedTuple):
    """The columns to draft from, R of each sequence."""

    rows: Tensor  # int64 [B, R]
    valid: Tensor  # bool [B, R]: False on filler rows


class StepLossAccumulator:
    """Accumulates losses and counts of drafting steps, added one after the other.

    Step k at column t is compared with the target's distribution at column t + k + 1. It is trained where M_k allows it
    and the draft vocabulary has the teacher's argmax, and counts as accepted when steps 0..k all drafted that argmax.
    A step may cover the first R' of the R roots only (P-EAGLE trains deep steps on a sample).
    """

    def __init__(self, batch: Batch, teacher: ColumnTeacher, num_steps: int, normaliser: Normaliser) -> None:
        """teacher: of all columns, or of the target columns; num_steps: the most steps that will be added."""
        self.batch, self.teacher, self.normaliser = batch, teacher, normaliser
        self.reachable_at_step = reachable(batch.mask, num_steps)  # [num_steps, B, T]
        self.roots = Roots(*packed_rows(self.reachable_at_step[0]))
        self.all_correct = self.roots.valid
        self.losses: list[Tensor] = []
        self.accepted: list[Tensor] = []
        self.num_reachable: list[Tensor] = []

    def use_roots(self, roots: Roots) -> None:
        """Replace the roots (all reachable columns by default); call before the first step."""
        assert not self.losses
        self.roots, self.all_correct = roots, roots.valid

    def target_columns(self, num_roots: int | None = None) -> Tensor:
        """The target columns of the next step, for the first `num_roots` roots: int64 [B, R']."""
        rows = self.roots.rows[:, :num_roots]
        return (rows + len(self.losses) + 1).clamp(max=self.batch.ids.shape[1] - 1)

    def add(self, logits: Tensor, loss: Callable[[Tensor, Teacher], Tensor]) -> None:
        """Add the next step: its logits [B, R', N]; loss: (logits, the teacher of their rows) -> [B, R']."""
        width = logits.shape[1]
        rows, valid = self.roots.rows[:, :width], self.roots.valid[:, :width]
        allowed = self.reachable_at_step[len(self.losses)].gather(1, rows) & valid
        teacher = self.teacher.at(self.target_columns(width))
        best = teacher.best
        row_losses = loss(logits, teacher)
        documents = self.batch.documents
        sequences = None if documents is None else documents.numbers.gather(1, rows).clamp(min=0)
        trained = allowed & (best >= 0)
        self.losses.append(average_losses(row_losses, trained, self.normaliser, self.batch.ids.numel(), sequences))
        # The logit at the teacher's argmax is the largest: the same as comparing argmaxes, at a tenth of the time.
        correct = logits.detach().gather(-1, best.clamp(min=0)[..., None])[..., 0] >= logits.detach().amax(-1)
        self.all_correct = self.all_correct[:, :width] & correct & (best >= 0)
        self.accepted.append((self.all_correct & allowed).sum())
        self.num_reachable.append(allowed.sum())

    def result(self, decay: float) -> StepLosses:
        """Combine all steps into one loss, step k weighted decay^k / sum decay^k."""
        stacked = torch.stack(self.losses)
        weights = decay ** torch.arange(len(self.losses), device=stacked.device, dtype=torch.float32)
        total = (stacked * weights).sum() / weights.sum()
        return StepLosses(total, stacked.detach(), torch.stack(self.accepted), torch.stack(self.num_reachable))


def step_losses(
    batch: Batch,
    steps: Callable[[Tensor], Iterable[Tensor]],
    num_steps: int,
    teacher: ColumnTeacher,
    decay: float,
    normaliser: Normaliser,
    loss: LossName = "soft_ce",
) -> StepLosses:
    """Losses and counts of every drafting step of one training forward; see StepLossAccumulator.

    steps: rows int64 [B, R] (the columns to draft from) -> the teacher-forced logits [B, R, N] of steps 0, 1, ...
    """
    accumulator = StepLossAccumulator(batch, teacher, num_steps, normaliser)
    for logits in steps(accumulator.roots.rows):
        accumulator.add(logits, partial(row_loss, loss))
    return accumulator.result(decay)
