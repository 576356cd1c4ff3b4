"""The processes that train one drafter together, each on its share of every batch, and what they tell each other.

Every process has all weights. Gradients are summed once a step, in buckets, after the last part of a process's share:
the loss of a share is divided by what that of the whole batch is divided by, so the sum is the whole batch's gradient.
PyTorch's DistributedDataParallel sums while gradients are still computed; methods that take gradients inside their
losses (Medusa, parallel MTP heads) do so behind its back, and a drafter is small: 0.4 billion gradients are summed in
some ten milliseconds between GPUs of one machine, where a step takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 1 << 24
"""Gradients that are sent together."""


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes: the one of number `rank`. Every method is called by all of them, in the same order.

    asked: says whether they are asked to stop.
    """

    rank: int = 0
    size: int = 1
    asked: Callable[[], bool] = lambda: False

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes files and reports."""
        return self.rank == 0

    @property
    def are_asked_to_stop(self) -> bool:
        """What `asked` says to the first one, for all; the others may hear of it later or earlier."""
        return self.is_first and self.asked()

    def first_says(self, answers: Sequence[bool], device: torch.device) -> list[bool]:
        """The first process's answers, in all of them."""
        if self.size == 1:
            return list(answers)
        told = torch.tensor(answers, dtype=torch.float32, device=device)
        self.send(told, 0)
        return told.bool().tolist()

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, the same bits in each; `values` becomes it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def send(self, values: Tensor, owner: int) -> None:
        """Give `values` of process `owner` to all others."""
        if self.size > 1:
            dist.broadcast(values, owner)

    def wait(self) -> None:
        """Wait until all are here."""
        if self.size > 1:
            dist.barrier()

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let every process have the sum of all processes' gradients; one that none of them has stays None."""
        if self.size == 1:
            return
        device = parameters[0].device
        found = self.sum(torch.tensor([float(p.grad is not None) for p in parameters], device=device))
        gradients: list[Tensor] = []
        for parameter, number in zip(parameters, found.tolist(), strict=True):
            if number and parameter.grad is None:  # it had no rows of this batch
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            together = self.sum(torch.cat([gradient.flatten() for gradient in bucket]))
            for gradient, part in zip(bucket, together.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one type together, up to BUCKET numbers or one tensor."""
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        if not buckets or gradient.numel() > room or gradient.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(gradient)
        room -= gradient.numel()
    return buckets


def shared_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of every item such that all have about as much: the largest first, to whoever has the least."""
    loads, ranks = [0] * num_ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks
