"""The training loss: distances to the target's own distribution, averaged over columns and drafting steps.

Steps are weighted decay^k / sum decay^k: dividing by the sum keeps the effective learning rate when the number of steps
changes. Distances at one row: p = the target's distribution, q = softmax of the student's logits; alpha = sum_v
min(p(v), q(v)), which is the probability that rejection sampling keeps a token drawn from q (Leviathan et al. 2023,
arXiv:2211.17192).
  soft_ce   -sum_v p(v) log q(v)                     Hinton et al. 2015, arXiv:1503.02531; EAGLE's classification loss
  kl        sum_v p(v) log(p(v) / q(v))              soft_ce less the teacher's entropy: another number, one gradient
  reverse_kl   sum_v q(v) log(q(v) / p(v))           DistillSpec, Zhou et al. 2023, arXiv:2310.08461: seeks one mode
  js        (KL(p, m) + KL(q, m)) / 2, m = (p + q) / 2    the same; Agarwal et al. 2023, arXiv:2306.13649, beta = 1/2
  tv        1 - alpha                                total variation: the probability of a rejection itself
  lk_alpha  -log alpha                               Samarin et al. 2026: its gradient is tv's, divided by alpha
  lk        l KL + (1 - l) TV, l = exp(-3 alpha)     Samarin et al. 2026, arXiv:2602.23881, hybrid; l has no gradient
  top_k     -sum_{v in the K largest p} p(v) log q(v)     HASS, Zhang et al. 2025, arXiv:2408.15766, section 3.1
  hard_ce   -log q(v*), v* the target's greedy token      for greedy decoding, and for answers written greedily
and smooth_l1 between hidden states: mean over H of d^2 / 2 where |d| < 1, else |d| - 1/2 (EAGLE, Li et al. 2024,
arXiv:2401.15077, section 3.2; Huber 1964).

A student with a pruned vocabulary of N tokens cannot draft the others. Cross-entropies and KL compare with p
renormalised over the N; alpha is taken with p as it is (its mass inside the N may be below 1), so 1 - tv stays the
acceptance probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from components.drafts.interface import AbstractDraft, Batch, Roots, StepLosses
from components.drafts.network.layers import WIDTH_STEP, packed_rows, reachable, shift_left
from components.drafts.network.recompute import recomputed
from components.drafts.settings import Distilled, LossName
from components.targets.interface import AbstractTarget

Normaliser = Literal["token", "sequence", "position"]
TEACHER_COLUMNS = 64
ENTRIES_IN_CACHE = 1 << 18
"""Logits that are judged at once on a CPU: with what is made of them they stay in its cache."""


class Limits(NamedTuple):
    """How much exists at once."""

    kept: int = 1 << 30
    """Bytes of logits whose gradients are kept for the backward pass; further logits are computed a second time."""
    at_once: int = 1 << 27
    """Logits of all steps together at roots that are judged at once, beside their teacher."""
    together: int = 1 << 22
    """Logits up to which several steps are one product."""


USUAL = Limits()
LIMITS = ContextVar("limits", default=USUAL)


@contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Other limits while it lasts; gradients computed later keep to them."""
    token = LIMITS.set(limits)
    try:
        yield
    finally:
        LIMITS.reset(token)


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


class LazyTeacher(NamedTuple):
    """A teacher that keeps no distributions: they are computed for the columns that are asked for."""

    target: AbstractTarget
    last: Tensor  # [B, T, H], before the final norm
    student_ids: Tensor | None

    @property
    def num_tokens(self) -> int:
        """Of the student's vocabulary."""
        return self.target.shape.vocab_size if self.student_ids is None else self.student_ids.numel()

    def over(self, columns: Tensor) -> SparseTeacher:
        """The teacher at these columns, int64 [B, C], each computed once."""
        num_sequences, num_columns = self.last.shape[:2]
        offsets = torch.arange(num_sequences, device=columns.device)[:, None] * num_columns
        needed = (columns + offsets).unique()
        index = torch.zeros(num_sequences * num_columns, dtype=torch.int64, device=columns.device)
        index[needed] = torch.arange(len(needed), device=columns.device)
        needed = F.pad(needed, (0, -len(needed) % WIDTH_STEP))  # the filler is column 0
        teacher = teacher_distributions(self.target, self.last.flatten(0, 1)[needed][None], self.student_ids)
        return SparseTeacher(teacher, index.view(num_sequences, num_columns))

    def at(self, rows: Tensor) -> Teacher:
        return self.over(rows).at(rows)


def teacher_for_steps(target: AbstractTarget, batch: Batch, student_ids: Tensor | None) -> LazyTeacher:
    """The teacher for `StepLossAccumulator.add_steps`."""
    return LazyTeacher(target, batch.last, student_ids)


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
    logits = target.silence(target.unembed(target.final_norm(columns[None])))[0].float()
    best = logits.argmax(-1)
    if student_ids is None:
        return Teacher(logits.softmax(-1), best, torch.ones_like(best, dtype=torch.float32))
    student_index = torch.full((logits.shape[-1],), -1, device=best.device)
    student_index[student_ids] = torch.arange(student_ids.numel(), device=best.device)
    student_logits = logits.index_select(-1, student_ids)
    mass = (student_logits.logsumexp(-1) - logits.logsumexp(-1)).exp()
    return Teacher(student_logits.softmax(-1), student_index[best], mass)


def average_losses(
    losses: Tensor,
    included: Tensor,
    normaliser: Normaliser,
    num_positions: int,
    sequences: Tensor | None = None,
    divisor: Tensor | None = None,
) -> Tensor:
    """Average losses [B, R] over the rows where included, bool [B, R].

    token: mean over included rows. sequence: mean over the means of sequences, so that short answers weigh as much as
    long ones. position: sum divided by the B * T positions of the padded batch, as the first public trainers do.
    sequences: int64 [B, R], the sequence of every row, from 0; None: each b is one sequence. divisor: what the sum is
    divided by instead, for a part of a larger batch (`divisors`).
    """
    masked = losses.masked_fill(~included, 0.0)
    if normaliser == "position":
        return masked.sum() / num_positions
    if normaliser == "token":
        return masked.sum() / (included.sum() if divisor is None else divisor).clamp(min=1)
    if sequences is None:
        sums, counts = masked.sum(1), included.sum(1)
    else:
        sequence_of_row, num_sequences = sequences[included], int(sequences.max()) + 1
        sums = masked.new_zeros(num_sequences).index_add(0, sequence_of_row, losses[included])
        counts = sequence_of_row.bincount(minlength=num_sequences)
    return (sums / counts.clamp(min=1)).sum() / ((counts > 0).sum() if divisor is None else divisor).clamp(min=1)


@torch.no_grad()
def divisors(batch: Batch, draft: AbstractDraft) -> Tensor:
    """What the losses of a drafter's steps are divided by in a batch, float32 [K]; those of its parts add up."""
    normaliser = draft.settings.normaliser
    assert normaliser != "position", "parts are padded apart"
    best = torch.zeros_like(batch.ids)
    if draft.student_ids is not None:
        answers = batch.mask.flatten().nonzero()[:, 0]
        for at in answers.split(TEACHER_COLUMNS):
            states = batch.last.flatten(0, 1)[at][None]
            best.view(-1)[at] = teacher_distributions(draft.target, states, draft.student_ids).best[0]
    numbers = torch.arange(len(best), device=best.device)[:, None].expand_as(best)
    if batch.documents is not None:
        numbers = batch.documents.numbers
    counts, at_step = [], reachable(batch.mask, draft.num_steps)
    roots = draft.training_roots(Roots(*packed_rows(at_step[0])), batch)
    for k, allowed in enumerate(at_step):
        has_best = shift_left(best, k + 1).gather(1, roots.rows) >= 0
        trained = _trained_at(roots, k) & allowed.gather(1, roots.rows) & has_best
        of_roots = numbers.gather(1, roots.rows)
        counts.append(trained.sum() if normaliser == "token" else of_roots[trained].unique().numel())
    return torch.tensor(counts, dtype=torch.float32, device=best.device)


def _trained_at(roots: Roots, step: int) -> Tensor:
    """Which of the roots a step is trained at: bool [B, R]."""
    return roots.valid if roots.num_steps is None else roots.valid & (roots.num_steps > step)


class Step(NamedTuple):
    """A drafting step whose logits do not exist yet."""

    states: tuple[Tensor, ...]  # [B, R', ...] each, row by row
    judge: Callable[..., tuple[Tensor, Tensor]]
    """(*states of some rows, the teacher of those rows) -> their losses [B, R''] and logits [B, R'', N]"""


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
        self.row_losses: list[tuple[Tensor, Tensor]] = []  # of every step: losses and which are trained, [B, R'] each
        self.accepted: list[Tensor] = []
        self.num_reachable: list[Tensor] = []

    def use_roots(self, roots: Roots) -> None:
        """Replace the roots (all reachable columns by default); call before the first step."""
        assert not self.losses
        self.roots, self.all_correct = roots, roots.valid

    def target_columns(self, num_roots: int | None = None, step: int | None = None) -> Tensor:
        """The target columns of a step (None: the next), for the first `num_roots` roots: int64 [B, R']."""
        rows = self.roots.rows[:, :num_roots]
        step = len(self.losses) if step is None else step
        return (rows + step + 1).clamp(max=self.batch.ids.shape[1] - 1)

    def add(self, logits: Tensor, loss: Callable[[Tensor, Teacher], Tensor]) -> None:
        """Add the next step: its logits [B, R', N]; loss: (logits, the teacher of their rows) -> [B, R']."""
        teacher = self.teacher.at(self.target_columns(logits.shape[1]))
        self._tally(loss(logits, teacher), *_hits(logits, teacher))

    def add_steps(self, steps: Iterable[Step]) -> None:
        """Add all steps, some roots at a time where they have many logits.

        The gradients of the first roots' logits are kept, within the limits; further logits are computed again when
        gradients are. The teacher is of `teacher_for_steps`.
        """
        teacher, steps, limits = self.teacher, list(steps), LIMITS.get()
        assert isinstance(teacher, LazyTeacher)
        columns = [self.target_columns(step.states[0].shape[1], k) for k, step in enumerate(steps)]
        num_sequences, num_roots = self.roots.rows.shape
        of_root = num_sequences * teacher.num_tokens * len(steps)
        at_once, num_kept = max(1, limits.at_once // of_root), limits.kept // (of_root * _itemsize(steps[0].states[0]))
        parts = []
        for start in range(0, num_roots, at_once):
            rows = [part[:, start : start + at_once] for part in columns]
            states = [tuple(part[:, start : start + at_once] for part in step.states) for step in steps]
            judged = _judged if start < num_kept else partial(recomputed, _judged)
            parts.append(judged(steps, states, teacher, rows, limits.together))
        for of_step in zip(*parts, strict=True):
            self._tally(*(torch.cat(rows, 1) for rows in zip(*of_step, strict=True)))

    def _tally(self, row_losses: Tensor, has_best: Tensor, correct: Tensor) -> None:
        """Add losses [B, R'] and `_hits` of the next step."""
        width = row_losses.shape[1]
        rows, valid = self.roots.rows[:, :width], _trained_at(self.roots, len(self.losses))[:, :width]
        allowed = self.reachable_at_step[len(self.losses)].gather(1, rows) & valid
        documents = self.batch.documents
        sequences = None if documents is None else documents.numbers.gather(1, rows).clamp(min=0)
        trained = allowed & has_best
        self.row_losses.append((row_losses, trained))
        divisor = None if self.batch.divisors is None else self.batch.divisors[len(self.losses)]
        self.losses.append(
            average_losses(row_losses, trained, self.normaliser, self.batch.ids.numel(), sequences, divisor)
        )
        self.all_correct = self.all_correct[:, :width] & correct & has_best
        self.accepted.append((self.all_correct & allowed).sum())
        self.num_reachable.append(allowed.sum())

    def result(self, decay: float) -> StepLosses:
        """Combine all steps into one loss, step k weighted decay^k / sum decay^k."""
        stacked = torch.stack(self.losses)
        weights = decay ** torch.arange(len(self.losses), device=stacked.device, dtype=torch.float32)
        total = (stacked * weights).sum() / weights.sum()
        return StepLosses(total, stacked.detach(), torch.stack(self.accepted), torch.stack(self.num_reachable))

    def survival_weighted(self, smoothing: float) -> StepLosses:
        """Combine all steps, over the same roots, into one loss with D-PACE's weights (survival_weights).

        The mean is over all trained rows of all steps, whatever the normaliser.
        """
        losses, trained = (torch.stack(parts) for parts in zip(*self.row_losses, strict=True))
        weights = survival_weights(losses, trained, smoothing)
        divisor = trained.sum() if self.batch.divisors is None else self.batch.divisors.sum()
        total = (losses * weights).sum() / divisor.clamp(min=1)
        per_step = torch.stack(self.losses).detach()
        return StepLosses(total, per_step, torch.stack(self.accepted), torch.stack(self.num_reachable))


def _itemsize(states: Tensor) -> int:
    """Bytes of a logit that a product makes of states."""
    kind = states.device.type
    return (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype).itemsize


def _judged(
    steps: Sequence[Step],
    states: Sequence[tuple[Tensor, ...]],
    teacher: LazyTeacher,
    columns: Sequence[Tensor],
    together: int,
) -> list[tuple[Tensor, ...]]:
    """Losses and `_hits` of every step at some roots: their states, and their target columns int64 [B, R']."""
    at_columns = teacher.over(torch.cat(tuple(columns), 1))
    results: list[tuple[Tensor, ...]] = []
    for some in _alike(steps, [rows.numel() * teacher.num_tokens for rows in columns], together):
        rows = torch.cat(tuple(columns[some]), 1)
        of_columns = at_columns.at(rows)
        losses, logits = steps[some.start].judge(
            *(torch.cat(parts, 1) for parts in zip(*states[some], strict=True)), of_columns
        )
        sizes = [each.shape[1] for each in columns[some]]
        parts = (part.split(sizes, 1) for part in (losses, *_hits(logits, of_columns)))
        results += zip(*parts, strict=True)
    return results


def _alike(steps: Sequence[Step], sizes: Sequence[int], together: int) -> Iterator[slice]:
    """Stretches of steps that one product judges: of one judge, and of `together` logits at most or a single step."""
    start = 0
    for end in range(1, len(steps) + 1):
        if end == len(steps) or steps[end].judge != steps[start].judge or sum(sizes[start : end + 1]) > together:
            yield slice(start, end)
            start = end


def _hits(logits: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Whether the draft vocabulary has the teacher's argmax, and whether the logits say it: bool [B, R] each."""
    best, scores = teacher.best, logits.detach()
    # The logit at the teacher's argmax is the largest: the same as comparing argmaxes, at a tenth of the time.
    return best >= 0, scores.gather(-1, best.clamp(min=0)[..., None])[..., 0] >= scores.amax(-1)


@torch.no_grad()
def survival_weights(losses: Tensor, trained: Tensor, smoothing: float) -> Tensor:
    """D-PACE's weights of K steps (arXiv:2605.18810): losses and trained [K, ...] -> float32 [K, ...].

    w_k = sum_{j >= k} prod_{i <= j} c_i, c = (1 - smoothing) exp(-loss) + smoothing: how much of the chain hangs on
    step k. Steps that are not trained weigh nothing and leave the others as they are.
    """
    confidence = (1.0 - smoothing) * torch.exp(-losses.float()) + smoothing
    survival = torch.where(trained, confidence, 1.0).cumprod(0).masked_fill(~trained, 0.0)
    return survival.flip(0).cumsum(0).flip(0).masked_fill(~trained, 0.0)


def step_losses(
    batch: Batch,
    states: Callable[[Tensor], Iterable[Tensor]],
    num_steps: int,
    teacher: LazyTeacher,
    settings: Distilled,
    head: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> StepLosses:
    """Losses and counts of every drafting step of one training forward; see StepLossAccumulator.

    states: rows int64 [B, R] (the columns to draft from) -> the teacher-forced states [B, R, ...] of steps 0, 1, ...
    head: states of some rows -> their logits [B, R', N].
    """
    accumulator = StepLossAccumulator(batch, teacher, num_steps, settings.normaliser)
    judge = judged_by(head, settings)
    accumulator.add_steps(Step((state,), judge) for state in states(accumulator.roots.rows))
    return accumulator.result(settings.step_decay)


def judged_by(head: Callable[[Tensor], Tensor], settings: Distilled) -> Callable[..., tuple[Tensor, Tensor]]:
    """The `judge` of a Step: the settings' loss on the logits of a head."""

    def judge(states: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        logits = head(states)
        return row_loss(settings.loss, logits, teacher), logits

    return judge


LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
TOP_K = 10  # HASS's K
SMALLEST = torch.finfo(torch.float32).tiny  # probabilities below it have no logarithm
LK_ETA = 3.0  # the exponent the LK paper found best


class Teacher(NamedTuple):
    """The target's next-token distributions at rows [...], over the N tokens that the student's softmax runs over."""

    probs: Tensor  # [..., N] float32, renormalised over those tokens
    best: Tensor  # [...] int64: index of the FULL vocabulary's argmax among them; -1: it is not one of them
    mass: Tensor  # [...] float32: the total probability of all N; 1 for a student with the full vocabulary

    def at(self, rows: Tensor) -> Teacher:
        """The columns rows, int64 [B, R], of a teacher over [B, T]."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        return Teacher(self.probs[sequence, rows], self.best.gather(1, rows), self.mass.gather(1, rows))


def row_loss(name: LossName, logits: Tensor, teacher: Teacher) -> Tensor:
    """The named loss at every row: logits [..., N] and a teacher of the same rows -> float32 [...]."""
    if name == "soft_ce":
        return soft_cross_entropy(logits, teacher.probs)
    if name == "kl":
        return kl_divergence(logits, teacher.probs)
    if name == "reverse_kl":
        return reverse_kl_divergence(logits, teacher.probs)
    if name == "js":
        return jensen_shannon(logits, teacher.probs)
    if name == "tv":
        return 1.0 - acceptance(logits, teacher)
    if name == "lk_alpha":
        return -acceptance(logits, teacher).clamp(min=SMALLEST).log()
    if name == "lk":
        return lk_hybrid(logits, teacher)
    if name == "top_k":
        return top_k_cross_entropy(logits, teacher.probs, TOP_K)
    assert name == "hard_ce", f"no loss is called {name!r}; there are {', '.join(LOSS_NAMES)}"
    return hard_cross_entropy(logits, teacher.best)


def loss_and_variation(
    name: LossName, logits: Tensor, teacher: Teacher, of_loss: float, of_variation: float
) -> tuple[Tensor, Tensor]:
    """of_loss L + of_variation (1 - alpha) at every row, L the named loss; and alpha, without a gradient."""
    if name not in ("soft_ce", "kl"):
        alpha = acceptance(logits, teacher)
        return of_loss * row_loss(name, logits, teacher) + of_variation * (1.0 - alpha), alpha.detach()
    mixed, alpha = _EntropyAndAcceptance.apply(logits, teacher.probs, teacher.mass, of_loss, -of_variation)
    if name == "kl":
        mixed = mixed + of_loss * torch.special.xlogy(teacher.probs, teacher.probs).sum(-1)
    return mixed + of_variation, alpha


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """-sum_v p(v) log q(v) at every row: logits and probs [..., N] -> float32 [...]; probs sum to 1."""
    losses: Tensor = _EntropyAndAcceptance.apply(logits, probs, None, 1.0, 0.0)[0]
    return losses


class _EntropyAndAcceptance(torch.autograd.Function):
    """a CE + b alpha at every row, and alpha without a gradient; a and b are numbers, mass is unused where b is 0.

    Its gradient is computed in the forward pass, so one [..., N] is saved for backward instead of several:
      a (q_v - p_v) + b q_v (1[q_v < p'_v] - sum_u q_u 1[q_u < p'_u]),   p' = mass p.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor, mass: Tensor | None, a: float, b: float) -> Any:
        gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        mixed, alpha = (torch.zeros(logits.shape[:-1], device=logits.device) for _ in range(2))
        rows = [logits.flatten(0, -2), probs.flatten(0, -2), gradient.flatten(0, -2), mixed.flatten(), alpha.flatten()]
        rows += [] if mass is None else [mass.flatten()]
        at_once = max(1, ENTRIES_IN_CACHE // logits.shape[-1]) if logits.device.type == "cpu" else len(rows[0])
        if isinstance(logits, FakeTensor):  # without contents: the first rows show what any hold
            rows = [part[:at_once] for part in rows]
        for some, p, into, value, accepted, *masses in zip(*(part.split(at_once) for part in rows), strict=True):
            exact = some.float()
            q = exact.softmax(-1)
            if a:
                log_sum = exact.amax(-1) - q.amax(-1).log()
                with torch.autocast(logits.device.type, enabled=False):  # it would round the product to bfloat16
                    value.add_(log_sum - torch.linalg.vecdot(p, exact), alpha=a)
            if b:
                whole = p * masses[0][:, None]
                slope = q * (q < whole)
                total = slope.sum(-1, keepdim=True)
                accepted.copy_(torch.minimum(whole, q, out=whole).sum(-1))
                value.add_(accepted, alpha=b)
                q.mul_(a - b * total).add_(slope, alpha=b)
            elif a != 1.0:
                q.mul_(a)
            into.copy_(q.sub_(p, alpha=a) if a else q)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(alpha)
        return mixed, alpha

    @staticmethod
    @once_differentiable  # the saved gradient is a constant to autograd: its second derivative would be zero
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0][..., None].to(gradient.dtype), None, None, None, None


def kl_divergence(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_v p(v) log(p(v) / q(v)) at every row: [..., N] -> float32 [...], in nats; 0 iff p = q."""
    return soft_cross_entropy(logits, probs) + torch.special.xlogy(probs, probs).sum(-1)


def reverse_kl_divergence(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_v q(v) log(q(v) / p(v)) at every row: [..., N] -> float32 [...], in nats; 0 iff p = q."""
    log_q = logits.float().log_softmax(-1)
    return (log_q.exp() * (log_q - probs.clamp(min=SMALLEST).log())).sum(-1)


def jensen_shannon(logits: Tensor, probs: Tensor) -> Tensor:
    """Half the divergences of p and of q from their mean: [..., N] -> float32 [...], from 0 to log 2; 0 iff p = q."""
    log_q = logits.float().log_softmax(-1)
    q = log_q.exp()
    log_mean = (0.5 * (probs + q)).clamp(min=SMALLEST).log()
    both = torch.special.xlogy(probs, probs) - probs * log_mean + q * (log_q - log_mean)
    return 0.5 * both.sum(-1)


def acceptance(logits: Tensor, teacher: Teacher) -> Tensor:
    """alpha = sum_v min(p(v), q(v)) at every row: [..., N] -> float32 [...], from 0 to the teacher's mass."""
    alpha: Tensor = _EntropyAndAcceptance.apply(logits, teacher.probs, teacher.mass, 0.0, 1.0)[0]
    return alpha


def lk_hybrid(logits: Tensor, teacher: Teacher) -> Tensor:
    """l KL(p, q) + (1 - l)(1 - alpha), l = exp(-LK_ETA alpha) held constant: [..., N] -> float32 [...].

    Far from the teacher KL has the gradient that total variation lacks; close to it, acceptance itself is optimised.
    """
    alpha = acceptance(logits, teacher)
    share = torch.exp(-LK_ETA * alpha.detach())
    return share * kl_divergence(logits, teacher.probs) + (1.0 - share) * (1.0 - alpha)


def top_k_cross_entropy(logits: Tensor, probs: Tensor, k: int) -> Tensor:
    """-sum over the k most likely tokens of p of p(v) log q(v): [..., N] -> float32 [...]. k >= N: all of them.

    Like HASS's, it is not renormalised: where p is spread out it weighs less.
    """
    likely, indices = probs.topk(min(k, probs.shape[-1]), dim=-1)
    logits = logits.float()
    return (likely * (logits.logsumexp(-1, keepdim=True) - logits.gather(-1, indices))).sum(-1)


def hard_cross_entropy(logits: Tensor, best: Tensor) -> Tensor:
    """-log q(best) at every row: logits [..., N], best int64 [...] -> float32 [...]; where best is -1, of token 0."""
    logits = logits.float()
    return logits.logsumexp(-1) - logits.gather(-1, best.clamp(min=0)[..., None])[..., 0]


def smooth_l1(hidden: Tensor, target: Tensor) -> Tensor:
    """Mean over H of the Huber function with its corner at 1: hidden and target [..., H] -> float32 [...]."""
    return F.smooth_l1_loss(hidden.float(), target.float(), reduction="none").mean(-1)
