"""The peak memory of training, by part, before it starts; what cannot fit is refused.

What a step keeps for its gradients is measured, not derived: the method's own losses run on short batches of random
states, and every tensor that lives is counted. All of it is a constant (weights in half precision) and two sums, over
columns and over the roots that are drafted from, so three short batches give those of any batch. Gradients, moments and
features are counted. On a CPU the estimate is of the process's resident set.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from components.contract import UserError
from components.data.features.format import FeatureRow
from components.drafts.interface import AbstractDraft, Batch
from components.drafts.network.layers import WIDTH_STEP
from components.drafts.network.recompute import recomputing_blocks
from components.drafts.training.batches import BatchOrder, padded_length
from components.drafts.training.hollow import tensors_in
from components.drafts.training.loop import Schedule, autocast, resolve_precision
from components.drafts.training.losses import LIMITS, Limits, limited
from components.drafts.training.optimizer import muon_matrices
from components.drafts.training.ranks import shared_out
from components.machine import free_ram

SHORT, LONG = 64, 192
"""Columns of the short batches. One is a multiple of the other, so that roots judged SHORT at a time leave no rest: all
parts then hold the same while they are judged, and two batches differ by what is kept."""


class Sizes(NamedTuple):
    """A batch: its columns, padding included, and the roots that are drafted from."""

    columns: int
    roots: int


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the peak of a training step."""

    held: int  # before the first step: program, weights, and what was read of the target
    gradients: int
    optimiser: int
    features: int
    activations: int
    logits: int  # of the rows that are judged at once, and what is kept of those for their gradients

    @property
    def needed(self) -> int:
        """What is not held yet."""
        return self.gradients + self.optimiser + self.features + self.activations + self.logits

    @property
    def total(self) -> int:
        return self.held + self.needed

    def text(self, num_steps: int) -> str:
        """One clause with every part."""
        return (
            f"peak memory {_gb(self.total)} GB: {_gb(self.held)} held now, gradients {_gb(self.gradients)}, optimiser"
            f" {_gb(self.optimiser)}, features of a batch {_gb(self.features)}, activations {_gb(self.activations)} of"
            f" {num_steps} steps, logits {_gb(self.logits)}"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"


class _Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self._note(tensor, 0)  # it was there before
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._note(tensor, tensor.untyped_storage().nbytes())
        return result

    def _note(self, tensor: Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._known:
            return
        self._known.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def check_memory(draft: AbstractDraft, order: BatchOrder, schedule: Schedule, device: torch.device) -> str:
    """The estimate in one clause; raises UserError for training that cannot fit, with a setting that would help."""
    free = _free(device) if device.type == "cuda" else _free(device) // schedule.processes
    memory = peak_memory(draft, order, schedule, device)
    if memory.needed <= free:
        return memory.text(draft.num_steps)
    row = max(map(order.length, order.rows))
    parts = padded_length(row) if draft.settings.normaliser != "position" else 0
    helps = "a smaller batch_tokens and max_tokens"
    leaner: list[dict[str, Any]] = [{"recompute": True}]
    leaner += [{"sharding": "full"}] if schedule.num_ranks > 1 else []
    leaner += [{"micro_batch_tokens": parts}, {"recompute": True, "micro_batch_tokens": parts}] if parts else []
    for changes in leaner:
        if peak_memory(draft, order, replace(schedule, **changes), device).needed <= free:
            helps = " and ".join(f"{name}: {str(value).lower()}" for name, value in changes.items())
            break
    raise UserError(
        f"train_draft: {memory.text(draft.num_steps)}; {_gb(free)} GB are free for {_gb(memory.needed)}: set {helps}"
    )


def _free(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return free_ram()


def peak_memory(draft: AbstractDraft, order: BatchOrder, schedule: Schedule, device: torch.device) -> PeakMemory:
    """The estimate for the largest batch of the first epoch."""
    shares = [share for batch in order.epoch(0) for share in order.shares(batch, schedule.num_ranks)]
    batches = [part for share in shares for part in order.parts(share, schedule.micro_batch_tokens)]
    most_roots = getattr(draft.settings, "max_anchors", order.max_tokens)
    largest = max(sizes_of(order, part, most_roots) for part in batches)
    return peak_of(draft, largest, schedule, device)


def sizes_of(order: BatchOrder, rows: Sequence[FeatureRow], most_roots: int) -> Sizes:
    """Of a batch of these rows, of at most so many roots each; every sequence is padded to the one with the most."""
    answers = [min(row.num_answer_tokens, order.length(row), most_roots) for row in rows]
    if order.packing == "pack":
        num_lanes = -(-sum(map(order.length, rows)) // order.lane_width)
        return Sizes(num_lanes * order.lane_width, min(num_lanes * order.lane_width, sum(answers)))
    columns = len(rows) * padded_length(max(map(order.length, rows)))
    return Sizes(columns, len(rows) * -(-max(answers) // WIDTH_STEP) * WIDTH_STEP)


def peak_of(draft: AbstractDraft, sizes: Sizes, schedule: Schedule, device: torch.device) -> PeakMemory:
    """The estimate for batches of these sizes."""
    width = draft.target.shape.hidden_size * (len(draft.target.tap_layers) + 1)
    precision = resolve_precision(schedule.precision, device)
    num_tokens = draft.target.shape.vocab_size if draft.student_ids is None else draft.student_ids.numel()
    limits, of_root = LIMITS.get(), num_tokens * draft.num_steps  # logits of a root
    judged_twice = Limits(kept=0, at_once=SHORT * of_root, together=0)

    @functools.cache
    def forward(size: Sizes, recompute: bool, kept: int) -> int:
        return _forward_peak(draft, size, precision, recompute, judged_twice._replace(kept=kept), device)

    def peak(recompute: bool) -> float:
        base, columns, roots = (forward(each, recompute, 0) for each in (short, wide, long))
        per_column, per_root = (columns - base) / (LONG - SHORT), (roots - columns) / (LONG - SHORT)
        return base + per_column * (sizes.columns - SHORT) + per_root * (sizes.roots - SHORT)

    short, wide, long = Sizes(SHORT, SHORT), Sizes(LONG, SHORT), Sizes(LONG, LONG)
    _forward_peak(draft, short, precision, False, judged_twice, device)  # makes what a drafter then keeps
    twice, once = (forward(long, False, kept) - forward(wide, False, kept) for kept in (0, sys.maxsize))
    kept_of_root = max(0.0, once - twice) / (LONG - SHORT)
    entries = min(limits.at_once, sizes.roots * of_root)
    num_kept = min(sizes.roots, (limits.kept // precision.itemsize + limits.at_once) // of_root)
    together = max(entries // draft.num_steps, min(limits.together, entries))
    logits = kept_of_root * num_kept + entries // draft.num_steps * 4
    logits += together * (8 + precision.itemsize) + (entries * precision.itemsize if num_kept < sizes.roots else 0)
    activations = peak(schedule.recompute)
    if schedule.recompute:  # and those of one block, while its gradients are computed
        activations += max(0.0, peak(recompute=False) - activations) / draft.num_steps
    gradients, optimiser = between_steps(draft, schedule)
    return PeakMemory(
        held=torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss,
        gradients=gradients,
        optimiser=optimiser,
        features=sizes.columns * width * 4,
        activations=int(activations),
        logits=int(logits),
    )


def between_steps(draft: AbstractDraft, schedule: Schedule) -> tuple[int, int]:
    """Bytes of gradients and of the optimiser's state: of a drafter alone, whatever the batches are."""
    weights = [weight.nbytes for weight in draft.parameters() if weight.requires_grad]
    matrices = [weight.nbytes for weight in muon_matrices(draft, schedule.optimizer).values()]
    if schedule.sharding == "full" and schedule.num_ranks > 1:  # shares, also of the weights and of summed gradients
        optimiser = (4 * sum(weights) - sum(matrices)) // schedule.num_ranks
    else:  # AdamW's moments, and the momentum of the process that steps the most matrices
        owners = shared_out(matrices, schedule.num_ranks)
        loads = [
            sum(size for size, owner in zip(matrices, owners, strict=True) if owner == rank) for rank in set(owners)
        ]
        optimiser = 2 * (sum(weights) - sum(matrices)) + max(loads, default=0)
    # The largest is there twice while a second use of it adds to its gradient.
    return sum(weights) + max(weights), optimiser


def _forward_peak(
    draft: AbstractDraft, sizes: Sizes, precision: torch.dtype, recompute: bool, limits: Limits, device: torch.device
) -> int:
    """Most bytes that live while the losses of one random row are computed."""
    generator, hidden = torch.Generator().manual_seed(0), draft.target.shape.hidden_size

    def states(width: int) -> Tensor:
        return torch.randn(1, sizes.columns, width, generator=generator).to(device)

    ids, mask = (torch.zeros(1, sizes.columns, dtype=kind, device=device) for kind in (torch.int64, torch.bool))
    mask[:, sizes.columns - sizes.roots :] = True
    taps, last = states(hidden * len(draft.target.tap_layers)), states(hidden)
    batch = Batch(ids, mask, taps, last, torch.tensor([sizes.columns], device=device))
    live = _Live()
    with limited(limits), recomputing_blocks(recompute), autocast(device, precision), live:
        result = draft.losses(batch)
        peak = live.peak
        del result
    return peak
