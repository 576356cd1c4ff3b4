"""The interface of a reader: it turns a stranger's checkpoint into a drafter of ours, or says what does not fit.

Inside Draftsmith a drafter is the settings that its method's `build` takes and a state dict under the names of its
method. A reader finds both in a checkpoint and collects every fault that it meets, so that one line names them all.
What is equal in effect but written in another way becomes a remark, which is kept with the drafter. Nothing is repaired
silently: a drafter that is half right looks like one that drifted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from components.contract import UserError
from components.drafts.importing.checkpoint import FoundCheckpoint
from components.outside_json import JsonObject
from components.targets.interface import AbstractTarget
from components.targets.shape import TapLayers

MOST_FAULTS = 6
"""Faults that a line names; more of them are counted."""


class Faults:
    """What does not fit, collected so that one line says all of it."""

    def __init__(self, label: str) -> None:
        self.label, self.found = label, list[str]()

    def add(self, fault: str) -> None:
        self.found.append(fault)

    def raise_any(self) -> None:
        """Raise UserError with every fault; return where there is none."""
        if self.found:
            more = f"; and {len(self.found) - MOST_FAULTS} more" if len(self.found) > MOST_FAULTS else ""
            raise UserError(f"{self.label}: {'; '.join(self.found[:MOST_FAULTS])}{more}")


@dataclass
class Imported:
    """A drafter that was read.

    tensors: under the names of its method. draft_ids: int64 [N], ascending target ids; None: all of them.
    names: name of the method -> name in the checkpoint, where they differ; a name that ends in a dot stands for all
    that begin so. remarks: what is written differently and
    means the same, or means something that engines do not agree on. tap_layers: those that it reads; (): the target's
    usual ones, or none.
    untrained: it has no weights of its own here (a given language model); tensors are empty then.
    """

    method: str
    settings: JsonObject
    tensors: dict[str, Tensor]
    draft_ids: Tensor | None = None
    names: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    untrained: bool = False
    tap_layers: TapLayers = ()

    def called(self, name: str) -> str:
        """The checkpoint's name of a tensor, also of one that it lacks."""
        if name in self.names:
            return self.names[name]
        for own, there in self.names.items():
            if own.endswith(".") and name.startswith(own):
                return there + name.removeprefix(own)
        return name


class AbstractReader(ABC):
    """One family of formats. Subclasses are final and without state."""

    layout: ClassVar[str]

    @abstractmethod
    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        """Whether a checkpoint is meant to be of this format, by its config and its tensors' names."""

    def stored(self, checkpoint: FoundCheckpoint) -> Iterable[str]:
        """The tensors that a drafter is made of, or more of them: what the disk must have room for."""
        return checkpoint.files

    @abstractmethod
    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        """The drafter; what does not fit the target goes to `faults`, and the caller raises them."""


def check_fit(imported: Imported, expected: Mapping[str, Tensor], faults: Faults) -> None:
    """Compare names and shapes with those of the network that the settings build; under the checkpoint's names."""
    for name in sorted(expected.keys() - imported.tensors.keys()):
        faults.add(f"{imported.called(name)} is missing")
    for name in sorted(imported.tensors.keys() - expected.keys()):
        faults.add(f"{imported.called(name)} is no part of {_article(imported.method)} drafter")
    for name in sorted(expected.keys() & imported.tensors.keys()):
        have, want = list(imported.tensors[name].shape), list(expected[name].shape)
        if have != want:
            turned = " (it is transposed)" if have == want[::-1] else ""
            faults.add(f"{imported.called(name)} is {have}, must be {want}{turned}")
        elif not imported.tensors[name].is_floating_point():
            dtype = str(imported.tensors[name].dtype).removeprefix("torch.")
            faults.add(f"{imported.called(name)} is {dtype}, no floating-point weights")


def pop_zero_biases(tensors: dict[str, Tensor], keep: tuple[str, ...], imported: Imported, faults: Faults) -> None:
    """Take the biases that the method's layers do not have out of `tensors`; only zeros can be left out."""
    for name in sorted(name for name in tensors if name.endswith(".bias") and name not in keep):
        if bool(tensors.pop(name).float().count_nonzero()):
            faults.add(f"{imported.called(name)} is not zero, and that layer has no bias here")
        else:
            imported.remarks.append(f"{imported.called(name)} is all zero and left out")


def read_vocabulary(d2t: Tensor, t2d: Tensor | None, vocab_size: int, faults: Faults) -> Tensor | None:
    """The target ids int64 [N] that the offsets d2t [N] stand for; None, and a fault, where they are no such ids.

    t2d: bool [V], where the checkpoint has it.
    """
    if d2t.ndim != 1 or d2t.is_floating_point() or d2t.dtype == torch.bool:
        faults.add(f"d2t is {str(d2t.dtype).removeprefix('torch.')} {list(d2t.shape)}, must be a row of integers")
        return None
    ids = d2t.long() + torch.arange(d2t.numel())
    member = None
    if t2d is not None:
        member = t2d.bool().nonzero().flatten()
        if t2d.shape != (vocab_size,):
            faults.add(f"t2d is {list(t2d.shape)}, the target's vocabulary has {vocab_size} tokens")
            return None
        if torch.equal(member, d2t.long()) and not torch.equal(member, ids):
            faults.add("d2t holds target ids (as t2d shows), must hold offsets: target id - draft id")
            return None
    if not ids.numel() or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        absolute = bool((d2t.diff() > 0).all()) and bool(((d2t >= 0) & (d2t < vocab_size)).all())
        hint = "; it seems to hold target ids, and must hold offsets: target id - draft id" if absolute else ""
        faults.add(f"d2t: the target ids i + d2t[i] leave the target's vocabulary (0..{vocab_size - 1}){hint}")
        return None
    if bool((ids.diff() <= 0).any()):
        faults.add("d2t: the target ids i + d2t[i] do not ascend")
        return None
    if member is not None and not torch.equal(member, ids):
        faults.add("t2d and d2t name different tokens: one of the two was changed alone")
        return None
    return ids


def _article(method: str) -> str:
    return f"{'an' if method[0] in 'aeiou' else 'a'} {method}"
