"""What the training of a drafter will hold and compute, before there is a target, a drafter or a row of data.

The drafter is built without contents (hollow.py) and takes one whole optimiser step, its own code all the way; memory
is that of memory.py, operations are counted by torch. Rows are as long as they are said to be, all alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from components.data.features.format import FeatureRow
from components.drafts.interface import AbstractDraft, Batch
from components.drafts.network.layers import TargetHead
from components.drafts.network.vocabulary import default_size
from components.drafts.settings import resolve_settings, settings_of_method
from components.drafts.storage.files import method_class
from components.drafts.training.batches import BatchOrder, padded_length
from components.drafts.training.hollow import HollowTarget, hollow_tensors
from components.drafts.training.loop import Schedule, autocast, resolve_precision
from components.drafts.training.memory import PeakMemory, between_steps, peak_memory
from components.drafts.training.optimizer import Optimizer, muon_matrices
from components.targets.shape import TapLayers, TargetShape

CPU = torch.device("cpu")
ROUGH_FLOPS = 3.0
"""Of a parameter at a column, forward and without the teacher, roughly: a drafter uses some several times.

Steps of seven methods for the built-in target come out at 0.4 to 2.5 times of what is counted operation by operation.
"""


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the conversations that are trained on, and how many of them are answers."""

    tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class TrainingAhead:
    """Of one drafter. flops: of an optimiser step over a whole batch, and of drafting once at every token of a row."""

    depth: int  # that it is trained for
    num_parameters: int
    weight_bytes: int
    muon_bytes: int  # of those, the matrices that Muon steps
    frozen_bytes: int  # the target's LM head, where it drafts with that, in every dtype that products are computed in
    peak: PeakMemory  # of one process; `held` is 0
    flops_of_step: float
    flops_of_update: float  # the optimiser's own, part of the above
    flops_of_row: float
    tokens_of_step: int  # padding included
    num_parts: int  # of a batch, for one process


def precision_of(setting: Literal["auto", "float32", "bfloat16"], *, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """The arithmetic that `precision` of train_draft means; a CPU is taken to multiply what this one does."""
    if setting == "auto" and on_gpu:
        return "bfloat16"
    return "bfloat16" if resolve_precision(setting, CPU) == torch.bfloat16 else "float32"


def training_ahead(
    shape: TargetShape,
    settings: Mapping[str, Any],
    rows: RowLengths,
    taps: TapLayers,
    *,
    dtype: Literal["float32", "bfloat16"],
    precision: Literal["float32", "bfloat16"],
    rough: bool = False,
) -> TrainingAhead | None:
    """None for a method that trains nothing, or that is given its model.

    settings: those of the step train_draft. dtype: of the target's numbers; precision: of the training graph.
    rough: nothing is gone through but the parameters, which takes tenths of a second where the whole takes several:
        operations are estimated by them, and activations and logits are left out of the memory.
    """
    method = str(settings["method"])
    of_method = settings_of_method(method, {method: settings["settings"].get(method, {})})
    if not of_method.trained or of_method.starts_trained:
        return None
    names = {field.name for field in fields(Schedule)}
    schedule = Schedule(**{name: value for name, value in settings.items() if name in names})
    schedule = replace(schedule, precision=precision)
    length = min(rows.tokens, settings["max_tokens"])
    padded = padded_length(length)
    num_rows = max(1, settings["batch_tokens"] // padded)
    of_batch = tuple(
        FeatureRow(str(number), "", "train", "", number, length, min(rows.answer_tokens, length - 1))
        for number in range(num_rows)
    )
    order = BatchOrder(of_batch, settings["batch_tokens"], settings["max_tokens"], 0, settings["packing"])
    num_drafted = settings["draft_vocab_size"] or default_size(shape.vocab_size)
    with hollow_tensors():
        target = HollowTarget(shape, getattr(torch, dtype), taps)
        draft = method_class(method).build(target, resolve_settings(of_method, 0), torch.arange(num_drafted))
        if rough:
            gradients, optimiser = between_steps(draft, schedule)
            peak = PeakMemory(0, gradients, optimiser, features=0, activations=0, logits=0)
            of_row, backwards, update = _rough_flops(draft, padded, min(rows.answer_tokens, length - 1))
        else:
            peak = peak_memory(draft, order, schedule, CPU)
            of_row, backwards, update = _flops(draft, padded, min(rows.answer_tokens, length - 1), schedule)
        size = sum(weight.numel() for weight in draft.parameters())
        heads = [module for module in draft.modules() if isinstance(module, TargetHead)]
        frozen = sum(head.num_bytes for head in heads)
        by_muon = sum(weight.numel() for weight in muon_matrices(draft, schedule.optimizer).values())
    share = order.shares(list(of_batch), schedule.num_ranks)[0]
    return TrainingAhead(
        depth=draft.num_steps,
        num_parameters=size,
        weight_bytes=4 * size,
        muon_bytes=4 * by_muon,
        frozen_bytes=frozen,
        peak=replace(peak, held=0),
        flops_of_step=num_rows * (of_row + backwards) + update,
        flops_of_update=update,
        flops_of_row=of_row,
        tokens_of_step=num_rows * padded,
        num_parts=len(order.parts(share, schedule.micro_batch_tokens)),
    )


def _rough_flops(draft: AbstractDraft, length: int, num_answers: int) -> tuple[float, float, float]:
    """As _flops, by the parameters: those of the drafter, and the target's head, which teaches at every answer."""
    of_draft = ROUGH_FLOPS * length * sum(weight.numel() for weight in draft.parameters())
    of_head = 2.0 * num_answers * draft.target.shape.vocab_size * draft.target.shape.hidden_size
    return of_draft + of_head, 2 * of_draft, 0.0


def _flops(draft: AbstractDraft, length: int, num_answers: int, schedule: Schedule) -> tuple[float, float, float]:
    """Operations of the losses of one row, of their gradients, and of one update of the weights."""
    hidden = draft.target.shape.hidden_size
    ids, mask = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.bool)
    mask[:, length - num_answers :] = True
    taps = torch.empty(1, length, hidden * len(draft.target.tap_layers))
    batch = Batch(ids, mask, taps, torch.empty(1, length, hidden), torch.tensor([length]))
    optimizer = Optimizer(draft, schedule.optimizer, schedule.weight_decay, schedule.muon_lr_scale)
    with FlopCounterMode(display=False) as counted:
        with autocast(CPU, torch.bfloat16):  # products that torch counts, whatever the precision
            loss = draft.losses(batch).loss
        forwards = counted.get_total_flops()
        loss.backward()
        backwards = counted.get_total_flops() - forwards
        optimizer.step(1e-3, schedule.clip_norm)
        update = counted.get_total_flops() - forwards - backwards
    return float(forwards), float(backwards), float(update)
