"""A drafter's weights, gradients and moments in shares, one a process: PyTorch's FSDP2 (`fully_shard`).

The drafter as a whole is one unit: its weights are gathered before the losses of a batch are computed and let go once
their gradients are, which are summed and cut into shares at the same time. So what lasts from step to step (weights,
moments, sums of gradients) is divided by the number of processes. What lives during a step is not: a drafter's block
runs again and again in one, and gathering it anew each time would cost more than the rest of the step. Muon runs on
shares too: DTensor cuts its products into parts and gathers what each needs. A checkpoint is safetensors of the whole
drafter: torch.distributed.checkpoint is not used, since it pickles, and what is unpickled would have to be trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, distributed, nn

from components.drafts.interface import AbstractDraft, Batch, StepLosses
from components.targets.spread import is_share


@final
class Shares:
    """Makes every parameter of a drafter the share of one of `num_ranks` processes, which all call every method."""

    def __init__(self, draft: AbstractDraft, num_ranks: int) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = distributed.init_device_mesh(draft.target.device.type, (num_ranks,))
        self._losses = _Losses(draft)
        self._unit = fully_shard(self._losses, mesh=mesh, reshard_after_forward=False)  # the same object
        self._unit.set_gradient_divide_factor(1.0)  # gradients are summed (ranks.py)
        self._unit.set_force_sum_reduction_for_comms(True)
        self._unit.set_reduce_scatter_unused_params(True)  # which ones are used depends on a process's rows

    def losses(self, batch: Batch | None, *, last: bool) -> StepLosses:
        """As AbstractDraft.losses; None: of no rows. With the gradients of the `last` ones all processes' are summed.

        Between two last ones each process may have as many others as it likes.
        """
        self._unit.set_requires_gradient_sync(last)
        self._unit.set_reshard_after_backward(last)
        result: StepLosses = self._losses(batch)
        return result

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While it lasts every process has all weights, for what is no training."""
        with torch.no_grad():
            self._losses(None)
        try:
            yield
        finally:
            self._unit.reshard()


@final
class _Losses(nn.Module):
    """A drafter's losses as a forward pass."""

    def __init__(self, draft: AbstractDraft) -> None:
        super().__init__()
        self.draft = draft

    def forward(self, batch: Batch | None) -> StepLosses:
        if batch is not None:
            return self.draft.losses(batch)
        nothing = torch.zeros(self.draft.num_steps, device=self.draft.target.device)
        trained = next(weight for weight in self.draft.parameters() if weight.requires_grad)
        return StepLosses(0.0 * trained.flatten()[0], nothing, nothing, nothing)


def whole(tensor: Tensor) -> Tensor:
    """The tensor of a share, which all processes ask for; any other as it is."""
    return tensor.full_tensor() if is_share(tensor) else tensor


def share_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This process's share of a tensor that all have, as it has one of the parameter; else the tensor on its device."""
    tensor = tensor.to(parameter.device)
    if not is_share(parameter):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
