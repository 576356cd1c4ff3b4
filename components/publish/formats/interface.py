"""The interface of a checkpoint format: it writes a drafter, checks a checkpoint and reads one back. One file a format.

Inside Draftsmith a drafter is the settings that its method's `build` takes and its state dict under the names of
components/drafts (DrafterState). A layout turns that into the config.json and tensors that engines load (Checkpoint),
states exactly which tensors a sound checkpoint has, and turns one back into a DrafterState, so that a release is
decoded with here before any engine loads it.
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
from components.drafts.network.layers import head_rows, rows_unlike
from components.drafts.settings import settings_class
from components.drafts.storage.quantisation import Packed
from components.engines.profiles import TargetFacts
from components.outside_json import JsonObject, read_object
from components.publish.formats.checkpoint import WEIGHTS, Checkpoint, Config, Spec, tensors_in
from components.targets.config import MAX_CONFIG_BYTES
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.targets.shape import TapLayers, TargetShape
from components.weight_format import Storage

EMBEDDING = ("embed_tokens.weight", "wte.weight")
HEAD = ("lm_head.weight",)


class DrafterState(NamedTuple):
    """A drafter as components/drafts holds it.

    tensors: its state dict, and d2t and t2d where its vocabulary is cut. storage: how its weights are rounded, None as
    trained. packed: its quantised layers by name; `tensors` has their dequantised weights under the same names.
    tap_layers: those that it reads, where the method reads any; (): the target's usual ones.
    """

    method: str
    settings: JsonObject
    tensors: dict[str, Tensor]
    storage: Storage | None = None
    packed: Mapping[str, Packed] = MappingProxyType({})
    tap_layers: TapLayers = ()


@dataclass(frozen=True)
class Source:
    """The target that a checkpoint is for. A large one is not loaded where two of its tensors are enough.

    name: its public name. folder: its files. target: the loaded target, where the caller has one.
    """

    shape: TargetShape
    name: str
    folder: Path | None = None
    target: AbstractTarget | None = None

    def embedding(self) -> Tensor:
        """The token embedding [V, H]."""
        if self.target is None and not self._is_quantised:
            return self._read_stored(EMBEDDING)
        return self.loaded_target().embedding

    def head(self) -> Tensor:
        """The LM head [V, H]; it is the embedding where the two are tied."""
        if self.target is None and not self._is_quantised:
            return self._read_stored(EMBEDDING if self.shape.tie_word_embeddings else HEAD)
        return head_rows(self.loaded_target(), torch.arange(self.shape.vocab_size))

    def loaded_target(self) -> AbstractTarget:
        """The target, loaded in float32 on the first call where the caller gave none."""
        return self.target if self.target is not None else self._loaded

    @functools.cached_property
    def _loaded(self) -> AbstractTarget:
        assert self.folder is not None
        return open_target(self.folder, dtype="float32", kernel="plain")

    @functools.cached_property
    def _is_quantised(self) -> bool:
        """Whether what its files hold must be dequantised, as its loader does."""
        assert self.folder is not None
        config = read_object(self.folder / "config.json", MAX_CONFIG_BYTES)
        return "quantization_config" in {**config, **(config.get("text_config") or {})}

    def _read_stored(self, endings: tuple[str, ...]) -> Tensor:
        expected_shape = [self.shape.vocab_size, self.shape.hidden_size]
        assert self.folder is not None
        for name, file in sorted(tensors_in(self.folder).items(), key=lambda item: len(item[0])):
            if name.endswith(endings) and ".layers." not in name and "mtp" not in name:
                with safe_open(file, framework="pt") as tensors:
                    tensor: Tensor = tensors.get_tensor(name)
                if list(tensor.shape) == expected_shape:
                    return tensor
        raise UserError(f"{self.name}: no tensor {' or '.join(endings)} of shape {expected_shape} in its checkpoint")


def facts_of(shape: TargetShape) -> TargetFacts:
    """The fields of a target that engines' limits depend on."""
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
    with_tokenizer: ClassVar[bool] = False  # the format includes the target's tokenizer files
    shares_head: ClassVar[bool] = False  # drafters use the target's whole LM head

    @abstractmethod
    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        """Config and tensors of a drafter. Raises UserError only where the format cannot hold such a drafter."""

    @abstractmethod
    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        """Whether a stranger's checkpoint is meant to be of this format."""

    @abstractmethod
    def check_config(self, config: Config, location: str) -> None:
        """Raises UserError, one line, for the first field of config.json that is missing or wrong."""

    @abstractmethod
    def expected(self, config: Config) -> dict[str, Spec]:
        """The tensors that a checkpoint with this config must or may have."""

    def check_values(self, checkpoint: Checkpoint, location: str) -> None:  # noqa: B027 - most formats have nothing to add
        """Raises UserError for tensors of the right shape with wrong values."""

    @abstractmethod
    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        """Raises UserError where the checkpoint cannot be for this target."""

    @abstractmethod
    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        """The inverse of `lay_out`, for a checkpoint that has passed its checks."""


def settings_of(drafter: DrafterState) -> Any:
    """The drafter's settings as its method's own class has them, defaults filled in."""
    return settings_class(drafter.method).model_validate(drafter.settings)


def own_embedding(tensors: dict[str, Tensor], source: Source, mask_token: int | None = None) -> JsonObject:
    """The setting of a drafter whose embedding is its own, {} for others, from whose tensors a copy is taken out.

    mask_token: the row of P-EAGLE's mask, which is no token's.
    """
    table = tensors.get("embed_tokens.weight")
    if table is None:
        return {}
    differs = rows_unlike(table, source.embedding())
    if mask_token is not None:
        differs[mask_token] = 0.0
    if bool(differs.count_nonzero()):
        return {"own_embedding": True}
    del tensors["embed_tokens.weight"]
    return {}


def replace_prefix(tensors: Mapping[str, Tensor], before: str, after: str) -> dict[str, Tensor]:
    """The tensors with the prefix `before` of their names replaced by `after`."""
    return {
        after + name.removeprefix(before) if name.startswith(before) else name: tensor
        for name, tensor in tensors.items()
    }


def without_vocabulary(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without d2t and t2d, for formats whose drafters use the target's whole vocabulary."""
    return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}


def whole_vocabulary(rows: Tensor, d2t: Tensor | None, vocab_size: int) -> Tensor:
    """LM head rows [N, H] of a cut vocabulary as rows of the whole one [V, H], with the same greedy draft tokens.

    Many formats have no cut vocabulary. A token outside it gets the mean of all rows: its logit is then the mean of
    theirs, which is never above the largest, so the argmax does not change. Rows of zeros would win wherever all other
    logits are negative. d2t None: the rows are returned as they are.
    """
    if d2t is None:
        return rows
    ids = d2t + torch.arange(d2t.numel())
    whole = rows.float().mean(0, keepdim=True).expand(vocab_size, -1).to(rows.dtype).clone()
    whole[ids] = rows
    return whole
