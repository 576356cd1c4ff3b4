"""Medusa: small residual heads on the target's last hidden state (Cai et al. 2024, arXiv:2401.10774, section 2.1).

Head i (from 0) drafts x_{t+2+i} from the target's state at x_t alone, after its final norm:
  h^0 = norm(y_t),   h^{j+1} = h^j + SiLU(W_{i,j} h^j + b_{i,j}),   q_{t+2+i} = softmax(U_i h^L).
W and b start at zero and U_i at the target's own LM head, so that an untrained head repeats the target's next token;
the target is frozen (Medusa-1). The token x_{t+1}, known when a proposal is made, is not read: only the sequential
methods (EAGLE, MTP) do that. No cache, no state.

Deviations: the loss is soft cross-entropy against the target's own distribution, where the paper takes the tokens of
its data (or of the target's answers); heads cover the draft vocabulary only. `head: tied` keeps U_i frozen at the
target's head, one for all heads: a fifth of the parameters, and one matrix to read instead of K.

Heads do not feed each other, so they are trained one at a time: memory for logits does not grow with their number.
Head k drafts x_{t+2+k} from the target's state at column t, whatever heads 0..k-1 drafted. So each head's forward and
backward can be finished before the next begins (Gloeckle et al. 2024, arXiv:2404.19737, section 2,
"memory-efficient implementation"): the logits of one head exist at a time instead of those of all. Their trunk also
gathers gradients from the heads; ours is the frozen target, so there is nothing to gather.

The training loop calls `backward` on one loss; that loss carries the gradients computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from components.drafts.interface import Batch, CommittedPositions, EveryPosition, StepLosses
from components.drafts.methods.batched import DepthDraft
from components.drafts.network.cached_block import linear_kernel
from components.drafts.network.layers import TargetHead, normed_state
from components.drafts.network.sampling import most_likely_at
from components.drafts.settings import Distilled, MedusaSettings
from components.drafts.training.losses import ColumnTeacher, StepLossAccumulator, row_loss, teacher_at_target_columns
from components.targets.forward.linear import Linear, lay_out
from components.targets.interface import AbstractTarget


@final
class ResBlock(nn.Module):
    """x + SiLU(W x + b), W and b zero at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Decoder(NamedTuple):
    """The weights laid out for decoding: for each head its residual layers; heads[k % len(heads)] is its LM head."""

    blocks: list[list[Linear]]
    heads: list[Linear]
    dtype: torch.dtype


@final
class Medusa(DepthDraft[Decoder]):
    """See the module docstring. Trained parameters: medusa_head.{i}.{j}.linear, and medusa_head.{i}.{L} unless tied."""

    method: ClassVar[str] = "medusa"
    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: MedusaSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings = settings
        self.num_steps = self.max_depth = settings.num_heads
        self.lm_head = TargetHead.of(target, draft_ids)
        hidden, tied = target.shape.hidden_size, settings.head == "tied"
        self.medusa_head = nn.ModuleList(
            nn.ModuleList(
                [
                    *(ResBlock(hidden) for _ in range(settings.num_layers)),
                    *(() if tied else (nn.Linear(hidden, draft_ids.numel(), bias=False),)),
                ]
            )
            for _ in range(settings.num_heads)
        )

    @classmethod
    def build(cls, target: AbstractTarget, settings: MedusaSettings, draft_ids: Tensor) -> Medusa:
        """As AbstractDraft. Nothing is drawn at random."""
        draft = cls(target, settings, draft_ids.to(target.device)).to(target.device)
        if draft.settings.head == "own":
            with torch.no_grad():
                for i in range(draft.num_steps):
                    draft._head_weight(i).copy_(draft.lm_head.weight)
        return draft

    @property
    def token_tables(self) -> frozenset[str]:
        last = self.settings.num_layers
        return frozenset(f"medusa_head.{i}.{last}.weight" for i in range(self.settings.num_heads))

    def _head_layers(self, index: int) -> nn.ModuleList:
        """The layers of one head, in order."""
        parts = self.medusa_head[index]
        assert isinstance(parts, nn.ModuleList)
        return parts

    def _head_weight(self, index: int) -> Tensor:
        """The LM head of one head, where heads are not tied: [N, H]."""
        table = self._head_layers(index)[-1]
        assert isinstance(table, nn.Linear)
        return table.weight

    def logits(self, index: int, hidden: Tensor) -> Tensor:
        """Head `index` on h^0: [..., H] -> [..., N]."""
        for part in self._head_layers(index):
            hidden = part(hidden)
        tied: Tensor = self.lm_head(hidden) if self.settings.head == "tied" else hidden
        return tied

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph, one head at a time."""
        self._decoder = None
        hidden, sequence = (
            normed_state(self.target, batch.last),
            torch.arange(len(batch.ids), device=batch.ids.device)[:, None],
        )

        def logits(index: int, rows: Tensor) -> Tensor:
            return self.logits(index, hidden[sequence, rows])

        heads = [Head(partial(logits, i), list(head.parameters())) for i, head in enumerate(self.medusa_head)]
        teacher = teacher_at_target_columns(self.target, batch, self.draft_ids)
        return independent_losses(batch, heads, teacher, self.settings)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, N] of heads 0, 1, ... at columns rows [B, R]; no head reads any token."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        hidden = normed_state(self.target, batch.last)[sequence, rows]
        return [self.logits(i, hidden) for i in range(self.num_steps)]

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        hidden = normed_state(self.target, last[first : ids.numel() - 1])
        heads = range(min(depth, self.max_depth))
        return EveryPosition.of_steps([most_likely_at(partial(self.logits, i), hidden, self.draft_ids) for i in heads])

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        blocks = [
            [
                Linear(part.linear.weight.detach().to(dtype), part.linear.bias.detach().to(dtype))
                for part in self._head_layers(i)
                if isinstance(part, ResBlock)
            ]
            for i in range(self.num_steps)
        ]
        tied = self.settings.head == "tied"
        tables = [self.lm_head.weight] if tied else [self._head_weight(i).detach() for i in range(self.num_steps)]
        heads = [linear_kernel(table.to(dtype), self.lm_head.bias if tied else None) for table in tables]
        self.kernel = lay_out([*(linear for layers in blocks for linear in layers), *heads], kernel)
        return Decoder(blocks, heads, dtype)

    def empty_state(self, decoder: Decoder, capacity: int) -> None:
        """No state: a proposal depends on the newest position alone."""

    def depth_logits(
        self, states: Sequence[None], committed: Sequence[CommittedPositions], depth: int, scaled: bool
    ) -> Tensor:
        """As DepthDraft; heads deeper than `depth` do not run."""
        decoder = self.prepared
        if depth == 0:
            return self.lm_head.weight.new_empty(0, len(committed), self.draft_ids.numel())
        newest = committed[0].last[-1:] if len(committed) == 1 else torch.stack([new.last[-1] for new in committed])
        initial = self.target.final_norm(newest).to(decoder.dtype)
        rows = []
        for layers in decoder.blocks[:depth]:
            hidden = initial
            for linear in layers:
                hidden = hidden + F.silu(linear(hidden))
            rows.append(hidden)
        if len(decoder.heads) == 1:  # one table for all heads is read once
            return decoder.heads[0](torch.cat(rows)).unflatten(0, (depth, len(committed)))
        return torch.stack([head(row) for head, row in zip(decoder.heads, rows, strict=False)])


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
