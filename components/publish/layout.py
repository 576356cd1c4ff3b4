"""What one format is: how a drafter is laid out in it, how it is checked, and how it is read back. One file a format.

Inside, every drafter has one form: the settings its method's `build` takes and its state dict under the names of
components/drafts (OwnForm). A layout turns that into a config.json and tensors that others load (LaidOut), says what
exactly a sound checkpoint of its kind holds, and turns one back into our own form, so that a release can be decoded
with before anybody else tries.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from components.contract import UserError
from components.drafts.frozen import head_rows
from components.drafts.quantised import Packed
from components.drafts.storage import Storage
from components.publish.checkpoint_files import WEIGHTS, tensors_in
from components.publish.exact_check import LaidOut, Spec
from components.publish.profiles import TargetFacts
from components.targets.load import open_target
from components.targets.model import AbstractTarget, TargetShape

EMBEDDING = ("embed_tokens.weight", "wte.weight")
HEAD = ("lm_head.weight",)


class OwnForm(NamedTuple):
    """A drafter as components/drafts knows it. tensors: its state dict, and d2t and t2d where its vocabulary is cut.

    storage: how its weights are stored, None as trained. packed: the layers in few bits, whose names are in `tensors`
    too, with what they stand for.
    """

    method: str
    settings: dict[str, Any]
    tensors: dict[str, Tensor]
    storage: Storage | None = None
    packed: Mapping[str, Packed] = MappingProxyType({})


@dataclass(frozen=True)
class Source:
    """The target a checkpoint is for, as far as layouts need it. A large one is not opened where two tensors will do.

    name: fit to be published. folder: its files. target: the same, where somebody has opened it already.
    """

    shape: TargetShape
    name: str
    folder: Path | None = None
    target: AbstractTarget | None = None

    def embedding(self) -> Tensor:
        """The token embedding [V, H]."""
        return self.target.embedding if self.target is not None else self._stored(EMBEDDING)

    def head(self) -> Tensor:
        """The LM head [V, H]; the embedding where the two are tied."""
        if self.target is not None:
            return head_rows(self.target, torch.arange(self.shape.vocab_size))
        return self._stored(EMBEDDING if self.shape.tie_word_embeddings else HEAD)

    def opened(self) -> AbstractTarget:
        """The target, opened now where it is not."""
        return self.target if self.target is not None else self._opened

    @functools.cached_property
    def _opened(self) -> AbstractTarget:
        assert self.folder is not None
        return open_target(self.folder, dtype="float32", kernel="plain")

    def _stored(self, endings: tuple[str, ...]) -> Tensor:
        wanted = [self.shape.vocab_size, self.shape.hidden_size]
        assert self.folder is not None
        for name, file in sorted(tensors_in(self.folder).items(), key=lambda item: len(item[0])):
            if name.endswith(endings) and ".layers." not in name and "mtp" not in name:
                with safe_open(file, framework="pt") as opened:
                    tensor: Tensor = opened.get_tensor(name)
                if list(tensor.shape) == wanted:
                    return tensor
        raise UserError(f"{self.name}: no tensor {' or '.join(endings)} of shape {wanted} in its checkpoint")


def facts_of(shape: TargetShape) -> TargetFacts:
    """What engines' limits depend on in a target."""
    return TargetFacts(
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        rope_scaling=shape.rope_scaling,
    )


class AbstractLayout(ABC):
    """One format. Subclasses are final and without state."""

    format: ClassVar[str]
    methods: ClassVar[tuple[str, ...]]
    weights_file: ClassVar[str] = WEIGHTS
    with_tokenizer: ClassVar[bool] = False  # the target's tokenizer files are part of it
    shares_head: ClassVar[bool] = False  # drafters guess by the target's own LM head, all of it

    @abstractmethod
    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """Config and tensors of a drafter; renames what is there and checks nothing but that the format can hold it."""

    @abstractmethod
    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """Whether a stranger's checkpoint is meant to be of this format."""

    @abstractmethod
    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """Raises UserError, one line, for the first field of config.json that is missing or wrong."""

    @abstractmethod
    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """Every tensor that belongs to a checkpoint with this config."""

    def check_values(self, laid_out: LaidOut, where: str) -> None:  # noqa: B027 - most formats have nothing to add
        """Raises UserError for tensors that are right in shape and wrong in what they say."""

    @abstractmethod
    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """Raises UserError where the checkpoint cannot be for this target."""

    @abstractmethod
    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """The inverse of `lay_out`, of a checkpoint that was checked."""


def inner_size(own: OwnForm, shape: TargetShape) -> int:
    """The width of the drafter's MLPs: its own setting, or the target's."""
    return int(own.settings.get("intermediate_size") or shape.intermediate_size)


def renamed(tensors: Mapping[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """Names that begin with `before` begin with `after`."""
    return {
        after + name.removeprefix(before) if name.startswith(before) else name: tensor
        for name, tensor in tensors.items()
    }


def without_vocabulary(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without d2t and t2d, for formats whose drafters use the target's whole vocabulary."""
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def whole_vocabulary(rows: Tensor, d2t: Tensor | None, vocab_size: int) -> Tensor:
    """LM head rows [N, H] of a cut vocabulary as rows of the whole one [V, H], with the same greedy guesses.

    Many formats know no cut vocabulary. A token that was never drafted gets the mean of all drafted rows: its logit is
    then the mean of theirs, which is never above the largest, so the argmax stays where it was. Rows of zeros would win
    wherever all drafted logits are negative.
    """
    if d2t is None:
        return rows
    ids = d2t + torch.arange(d2t.numel())
    whole = rows.float().mean(0, keepdim=True).expand(vocab_size, -1).to(rows.dtype).clone()
    whole[ids] = rows
    return whole
