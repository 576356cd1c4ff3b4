"""Heads that do not feed each other: trained one at a time, so that memory for logits does not grow with their number.

Head k drafts x_{t+2+k} from the target's state at column t, whatever heads 0..k-1 drafted. So each head's forward and
backward can be finished before the next begins (Gloeckle et al. 2024, arXiv:2404.19737, section 2,
"memory-efficient implementation"): the logits of one head exist at a time instead of those of all. Their trunk also
gathers gradients from the heads; ours is the frozen target, so there is nothing to gather.

The training loop calls `backward` on one loss; that loss carries the gradients computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from components.drafts.draft import Batch, Proposal, StepLosses
from components.drafts.losses import ColumnTeacher, StepLossAccumulator
from components.drafts.row_losses import row_loss
from components.drafts.sampling import DraftSampler
from components.drafts.settings import Distilled


class Head(NamedTuple):
    """One head. logits: rows int64 [B, R] (columns to draft from) -> [B, R, N]. parameters: all that are trained."""

    logits: Callable[[Tensor], Tensor]
    parameters: Sequence[nn.Parameter]


def independent_losses(batch: Batch, heads: Sequence[Head], teacher: ColumnTeacher, settings: Distilled) -> StepLosses:
    """As `losses.step_losses` for the same logits, with those of one head in memory at a time.

    Head k weighs decay^k / sum decay^k (Medusa: decay 0.8; Gloeckle et al.: 1). The loss carries its gradients: calling
    `backward` on it runs no graph. Without gradients (torch.no_grad) it is a plain number.
    """
    accumulator = StepLossAccumulator(batch, teacher, len(heads), settings.normaliser)
    weights = [settings.step_decay**k for k in range(len(heads))]
    parameters: list[nn.Parameter] = []
    gradients: list[Tensor] = []
    for head, weight in zip(heads, weights, strict=True):
        accumulator.add(head.logits(accumulator.roots.rows), partial(row_loss, settings.loss))
        if torch.is_grad_enabled():
            with torch.autocast(batch.ids.device.type, enabled=False):
                gradients += torch.autograd.grad(
                    accumulator.losses[-1] * (weight / sum(weights)), list(head.parameters)
                )
            parameters += head.parameters
            accumulator.losses[-1] = accumulator.losses[-1].detach()  # frees this head's logits
    result = accumulator.result(settings.step_decay)
    if not parameters:
        return result
    return result._replace(loss=_WithGradients.apply(result.loss, len(parameters), *parameters, *gradients))


class _WithGradients(torch.autograd.Function):
    """A loss with precomputed gradients: backward returns them, scaled by the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *parameters_and_gradients: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters_and_gradients[count:])
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.saved_tensors
        return (None, None, *(incoming * gradient for gradient in gradients), *(None for _ in gradients))


def sample_chain(logits: Tensor, sampler: DraftSampler) -> Proposal:
    """Sample a chain from one row of logits per depth, [K, N]."""
    for row in logits.split(1):
        sampler.sample(row)
    return sampler.proposal()
