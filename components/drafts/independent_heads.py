"""Heads that do not feed each other: trained one at a time, so that memory for logits does not grow with their number.

Head k guesses x_{t+2+k} from what the target knew at column t, whatever heads 0..k-1 guessed. Then each head's forward
and backward can be finished before the next begins (Gloeckle et al. 2024, arXiv:2404.19737, section 2,
"memory-efficient implementation"): the logits of one head exist at a time instead of those of all. Their trunk also
gathers gradients from the heads; ours is the frozen target, so there is nothing to gather.

For the training loop, which calls `backward` on one loss, the gradients that are already known wait in that loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from components.drafts.draft import Batch, Proposal, StepLosses
from components.drafts.losses import ColumnTeacher, StepJudge
from components.drafts.row_losses import row_loss
from components.drafts.sampling import Guesses
from components.drafts.settings import Distilled


class Head(NamedTuple):
    """One head. logits: rows int64 [B, R] (columns to draft from) -> [B, R, N]. parameters: all that it trains."""

    logits: Callable[[Tensor], Tensor]
    parameters: Sequence[nn.Parameter]


def independent_losses(batch: Batch, heads: Sequence[Head], teacher: ColumnTeacher, settings: Distilled) -> StepLosses:
    """What `losses.step_losses` gives for the same logits, with those of one head in memory at a time.

    Head k weighs decay^k / sum decay^k (Medusa: decay 0.8; Gloeckle et al.: 1). The loss carries its gradients: calling
    `backward` on it runs no graph. Without gradients (torch.no_grad) it is a plain number.
    """
    judge = StepJudge(batch, teacher, len(heads), settings.normaliser)
    weights = [settings.step_decay**k for k in range(len(heads))]
    parameters: list[nn.Parameter] = []
    gradients: list[Tensor] = []
    for head, weight in zip(heads, weights, strict=True):
        judge.add(head.logits(judge.roots.rows), lambda said, wanted: row_loss(settings.loss, said, wanted))
        if torch.is_grad_enabled():
            with torch.autocast(batch.ids.device.type, enabled=False):
                gradients += torch.autograd.grad(judge.losses[-1] * (weight / sum(weights)), list(head.parameters))
            parameters += head.parameters
            judge.losses[-1] = judge.losses[-1].detach()  # lets go of this head's logits
    result = judge.result(settings.step_decay)
    if not parameters:
        return result
    return result._replace(loss=_WithGradients.apply(result.loss, len(parameters), *parameters, *gradients))


class _WithGradients(torch.autograd.Function):
    """A number whose gradients were computed before: backward hands them out, times what comes from above."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *parameters_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters_and_gradients[count:])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return (None, None, *(above * gradient for gradient in gradients), *(None for _ in gradients))


def proposal_of(logits: Tensor, guesses: Guesses) -> Proposal:
    """A chain from one row of logits a depth, [K, N]."""
    for row in logits.split(1):
        guesses.pick(row)
    return guesses.proposal()
