"""What a drafter learns from: the target's own distribution, column by column and step by step.

Which distance is taken at a row is `row_losses.py`'s business; here rows become one number. Steps are weighted
decay^k / sum decay^k: dividing by the sum keeps the effective learning rate when the number of steps changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """What can be asked about columns of a batch: a Teacher over all [B, T], or one over those that matter."""

    def at(self, rows: Tensor) -> Teacher:
        """Of the columns rows, int64 [B, R]."""


class ChosenColumns(NamedTuple):
    """A teacher over some columns of a batch; asked about another column it answers with any of them."""

    teacher: Teacher  # over [1, C]
    places: Tensor  # int64 [B, T]: which of the C a column is

    def at(self, rows: Tensor) -> Teacher:
        """See ColumnTeacher."""
        places = self.places.gather(1, rows)
        return Teacher(*(part[0].index_select(0, places.flatten()).unflatten(0, rows.shape) for part in self.teacher))


def judged_teacher(target: AbstractTarget, batch: Batch, student_ids: Tensor | None) -> ChosenColumns:
    """`teacher_of` the columns that training's drafting steps are judged at, and of no other.

    Step k of root t is judged at t + k + 1, and where M_k(t) holds M_0(t + k) does: they are the columns after those in
    M_0. A prompt has none.
    """
    wanted = torch.nn.functional.pad(reachable(batch.mask, 1)[0][:, :-1], (1, 0)).flatten()
    columns = wanted.nonzero().squeeze(1)
    width = -(-max(1, len(columns)) // WIDTH_STEP) * WIDTH_STEP
    columns = torch.nn.functional.pad(columns, (0, width - len(columns)))  # the filler is column 0
    places = (wanted.cumsum(0) - 1).clamp(min=0).view_as(batch.ids)
    return ChosenColumns(teacher_of(target, batch.last.flatten(0, 1)[columns][None], student_ids), places)


@torch.no_grad()
def teacher_of(target: AbstractTarget, last: Tensor, student_ids: Tensor | None) -> Teacher:
    """The teacher from last-layer outputs [B, T, H], before the final norm.

    student_ids: int64 [N], the target ids of the student's vocabulary; None: all V.
    """
    columns = last.to(target.dtype).flatten(0, 1)
    with torch.autocast(last.device.type, enabled=False):
        # A few columns at a time: the logits of all over the full vocabulary would be the largest tensor of the step.
        parts = [_teacher_at(target, some, student_ids) for some in columns.split(TEACHER_COLUMNS)]
    return Teacher(*(torch.cat(part).unflatten(0, last.shape[:2]) for part in zip(*parts, strict=True)))


def _teacher_at(target: AbstractTarget, columns: Tensor, student_ids: Tensor | None) -> Teacher:
    """The teacher at columns [C, H]."""
    logits = target.unembed(target.final_norm(columns[None]))[0].float()
    best = logits.argmax(-1)
    if student_ids is None:
        return Teacher(logits.softmax(-1), best, torch.ones_like(best, dtype=torch.float32))
    places = torch.full((logits.shape[-1],), -1, device=best.device)
    places[student_ids] = torch.arange(student_ids.numel(), device=best.device)
    kept = logits.index_select(-1, student_ids)
    mass = (kept.logsumexp(-1) - logits.logsumexp(-1)).exp()
    return Teacher(kept.softmax(-1), places[best], mass)


def averaged(
    rows: Tensor, wanted: Tensor, normaliser: Normaliser, num_positions: int, sequences: Tensor | None = None
) -> Tensor:
    """One number from losses [B, R] where wanted [B, R].

    token: mean over wanted rows. sequence: mean over sequences of their means, so that short answers weigh as much as
    long ones. position: sum over the B * T positions of the padded batch, as the first public trainers do.
    sequences: int64 [B, R], the sequence of every row, from 0; None: those of one b are one.
    """
    kept = rows.masked_fill(~wanted, 0.0)
    if normaliser == "position":
        return kept.sum() / num_positions
    if normaliser == "token":
        return kept.sum() / wanted.sum().clamp(min=1)
    if sequences is None:
        sums, counts = kept.sum(1), wanted.sum(1)
    else:
        places, num_sequences = sequences[wanted], int(sequences.max()) + 1
        sums = kept.new_zeros(num_sequences).index_add(0, places, rows[wanted])
        counts = places.bincount(minlength=num_sequences)
    return (sums / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)


class Roots(NamedTuple):
    """The columns to draft from, R of each sequence."""

    rows: Tensor  # int64 [B, R]
    valid: Tensor  # bool [B, R]: False on filler rows


class StepJudge:
    """Losses and counts of drafting steps, given one after the other.

    Step k at column t is judged against the target's distribution at column t + k + 1. It is trained on where M_k
    allows it and the student can say the teacher's argmax, and counts as accepted when steps 0..k all guessed that
    argmax. A step may be given for the first R' of the R roots only (P-EAGLE trains deep guesses on a sample).
    """

    def __init__(self, batch: Batch, teacher: ColumnTeacher, num_steps: int, normaliser: Normaliser) -> None:
        """teacher: of all columns, or judged_teacher's; num_steps: at most so many steps will come."""
        self.batch, self.teacher, self.normaliser = batch, teacher, normaliser
        self.reached = reachable(batch.mask, num_steps)  # [num_steps, B, T]
        self.roots = Roots(*packed_rows(self.reached[0]))
        self.alive = self.roots.valid
        self.losses: list[Tensor] = []
        self.accepted: list[Tensor] = []
        self.counts: list[Tensor] = []

    def draw_from(self, roots: Roots) -> None:
        """Take these roots instead of all that are reachable; before the first step."""
        assert not self.losses
        self.roots, self.alive = roots, roots.valid

    def judged(self, num_roots: int | None = None) -> Tensor:
        """The columns that the coming step is judged at, for the first `num_roots` roots: int64 [B, R']."""
        rows = self.roots.rows[:, :num_roots]
        return (rows + len(self.losses) + 1).clamp(max=self.batch.ids.shape[1] - 1)

    def add(self, logits: Tensor, loss: Callable[[Tensor, Teacher], Tensor]) -> None:
        """The coming step's logits [B, R', N]; loss: (logits, the teacher of their rows) -> [B, R']."""
        width = logits.shape[1]
        rows, valid = self.roots.rows[:, :width], self.roots.valid[:, :width]
        allowed = self.reached[len(self.losses)].gather(1, rows) & valid
        teacher = self.teacher.at(self.judged(width))
        best = teacher.best
        row_losses = loss(logits, teacher)
        documents = self.batch.documents
        sequences = None if documents is None else documents.numbers.gather(1, rows).clamp(min=0)
        trained = allowed & (best >= 0)
        self.losses.append(averaged(row_losses, trained, self.normaliser, self.batch.ids.numel(), sequences))
        # The logit at the teacher's argmax is the largest: the same as comparing argmaxes, at a tenth of the time.
        said = logits.detach().gather(-1, best.clamp(min=0)[..., None])[..., 0] >= logits.detach().amax(-1)
        self.alive = self.alive[:, :width] & said & (best >= 0)
        self.accepted.append((self.alive & allowed).sum())
        self.counts.append(allowed.sum())

    def result(self, decay: float) -> StepLosses:
        """Everything so far as one loss, step k weighted decay^k / sum decay^k."""
        stacked = torch.stack(self.losses)
        weights = decay ** torch.arange(len(self.losses), device=stacked.device, dtype=torch.float32)
        total = (stacked * weights).sum() / weights.sum()
        return StepLosses(total, stacked.detach(), torch.stack(self.accepted), torch.stack(self.counts))


def step_losses(
    batch: Batch,
    steps: Callable[[Tensor], Iterable[Tensor]],
    num_steps: int,
    teacher: ColumnTeacher,
    decay: float,
    normaliser: Normaliser,
    loss: LossName = "soft_ce",
) -> StepLosses:
    """Losses and counts of every drafting step of one training forward; see StepJudge.

    steps: given rows int64 [B, R] (the columns to draft from), the teacher-forced logits [B, R, N] of steps 0, 1, ...
    """
    judge = StepJudge(batch, teacher, num_steps, normaliser)
    for logits in steps(judge.roots.rows):
        judge.add(logits, lambda said, wanted: row_loss(loss, said, wanted))
    return judge.result(decay)
