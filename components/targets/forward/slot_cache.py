"""The cache of a transformers model as targets need it: ragged batches, truncation, trees.

transformers' DynamicCache appends the same number of slots to every sequence. So a slot is not a column: beside the
cache, `live` marks the slots of each sequence that hold a token. Dead slots (padding, rejected drafts) are hidden by
the attention mask, dropped when last in every sequence, and squeezed out when there are too many.

transformers computes its masks from slot numbers. Since slots are not positions, windows and chunks are cut here, from
the positions of queries and keys: one mask for each kind of attention layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from components.contract import UserError
from components.targets.forward.recurrent import (
    Recorder,
    RecurrentCalls,
    RecurrentStates,
    StateAndAttentionLayer,
    StateLayer,
)
from components.targets.interface import AbstractCache
from components.targets.shape import LAYER_KINDS, WITHOUT_ATTENTION, layer_types_of

_SLOT_TENSORS = ("keys", "values", "indexer_keys")
"""The tensors of a layer that hold one row for each slot, on the axis before the last."""
_SPARE_SLOTS = 64
"""Dead slots tolerated before the cache is squeezed."""


def cache_layers(config: Any, location: str) -> list[Any]:
    """Empty layers for a text model's configuration; raises UserError for a kind that cannot go back.

    Layers with a window keep all positions, so that tokens can be dropped; the masks cut the window.
    """
    layers: list[Any] = []
    for number, layer in enumerate(DynamicCache(config=config).layers):
        kind = type(layer)
        if kind in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append(DynamicLayer())
        elif kind is DynamicIndexedLayer:
            layers.append(DynamicIndexedLayer())
        elif kind is LinearAttentionLayer:
            layers.append(StateLayer(layer.number_of_states))
        elif kind in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
            layers.append(StateAndAttentionLayer(layer.number_of_states))
        elif kind is DummyLayer:
            layers.append(DummyLayer())
        else:
            raise UserError(
                f"{location}: layer {number} has a {kind.__name__}, which cannot drop rejected draft tokens"
            )
    return layers


class SlotCache(AbstractCache):
    """A DynamicCache and, for each sequence, which of its slots are live. Live slots are in column order."""

    def __init__(
        self, layers: Sequence[Any], batch_size: int, capacity: int, bytes_per_token: int, recorder: Recorder
    ) -> None:
        """layers: of `cache_layers`. recorder: catches the inputs of the model's recurrent modules, if it has any."""
        self.cache = DynamicCache()
        self.cache.layers = list(layers)
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        self.live = torch.zeros(batch_size, 0, dtype=torch.bool)  # [B, slots], on the CPU
        self._bytes_per_token = bytes_per_token
        has_states = any(isinstance(layer, StateLayer) for layer in layers)
        self.states = RecurrentStates(recorder, self.cache) if has_states else None

    @property
    def attention_layers(self) -> list[DynamicLayer]:
        """Layers with keys and values of their own that have seen a token."""
        return [layer for layer in self.cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]

    @torch.inference_mode()
    def put(self, sequences: Sequence[int], other: AbstractCache) -> None:
        """As AbstractCache; the slots of `other` become the first ones of these sequences, the rest are dead."""
        assert isinstance(other, SlotCache) and len(sequences) == len(other.lengths)
        assert int(other.lengths.max()) <= self.capacity
        width, places = other.live.shape[1], torch.tensor(list(sequences))
        more = max(0, width - self.live.shape[1])
        self.live = torch.nn.functional.pad(self.live, (0, more))
        for layer, other_layer in zip(self.cache.layers, other.cache.layers, strict=True):
            for name in _SLOT_TENSORS:
                if (new := getattr(other_layer, name, None)) is None:
                    continue
                part = getattr(layer, name, None)
                if part is None or part.shape[0] != len(self.lengths):  # an empty layer
                    part = new.new_zeros(len(self.lengths), *new.shape[1:-2], 0, new.shape[-1])
                part = torch.nn.functional.pad(part, (0, 0, 0, self.live.shape[1] - part.shape[-2]))
                part[places.to(part.device), ..., :width, :] = new
                if name == "keys" and not layer.is_initialized:
                    layer.lazy_initialization(part, part)
                if name == "indexer_keys" and not layer.is_indexer_initialized:
                    layer.lazy_initialization_indexer(part)
                setattr(layer, name, part)
        self.live[places] = False
        self.live[places, :width] = other.live
        self.lengths = self.lengths.index_copy(0, places, other.lengths)
        if self.states is not None:
            assert other.states is not None
            self.states.put(sequences, other.states, self.lengths)
        self._drop_dead_tail()

    @torch.inference_mode()
    def truncate(self, lengths: Tensor) -> None:
        assert bool((lengths <= self.lengths).all()) and bool((lengths >= 0).all())
        if self.states is not None:
            self.states.truncate(lengths, self.lengths)
        self.lengths = lengths.clone()
        self.live = self.live & (self.live.cumsum(dim=1) <= lengths[:, None])
        self._drop_dead_tail()

    @torch.inference_mode()
    def keep(self, start: Tensor, rows: Sequence[Sequence[int]]) -> None:
        """As AbstractCache; no row is moved, the slots of the others become dead."""
        assert self.states is None, "recurrent states follow one sequence: they have no rows to choose from"
        appended = self.live & (self.live.cumsum(dim=1) > start[:, None])
        for sequence, kept_rows in enumerate(rows):
            slots = appended[sequence].nonzero().squeeze(1)
            self.live[sequence, slots] = False
            self.live[sequence, slots[list(kept_rows)]] = True
        self.lengths = self.live.sum(dim=1)
        self._drop_dead_tail()

    def select(self, sequences: Sequence[int]) -> None:
        order = torch.tensor(list(sequences))
        self.live, self.lengths = self.live[order], self.lengths[order]
        for layer in self.attention_layers:
            layer.batch_select_indices(order.to(layer.keys.device))
        if self.states is not None:
            self.states.select(sequences, self.lengths)
        self._drop_dead_tail()

    def bytes_per_token(self) -> int:
        return self._bytes_per_token

    def num_bytes(self) -> int:
        """Bytes of what is kept for each slot; recurrent states have one size and do not count."""
        parts = (getattr(layer, name, None) for layer in self.attention_layers for name in _SLOT_TENSORS)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def positions(self) -> Tensor:
        """int64 [B, slots]: the column of each live slot; dead slots have the one before."""
        return self.live.cumsum(dim=1) - 1

    def append(self, valid: Tensor, calls: RecurrentCalls) -> None:
        """Record the slots of a finished pass. valid: bool [B, T]; calls: of the recurrent modules, as recorded."""
        if self.states is not None:
            self.states.append(calls, valid, self.lengths)
        self.live = torch.cat([self.live, valid], dim=1)
        self.lengths = self.lengths + valid.sum(dim=1)
        self._drop_dead_tail()
        if self.live.shape[1] > int(self.lengths.max()) + _SPARE_SLOTS:
            self._squeeze()

    def _drop_dead_tail(self) -> None:
        used = self.live.any(dim=0).nonzero()
        num_slots = int(used[-1]) + 1 if used.numel() else 0
        if num_slots < self.live.shape[1]:
            for layer in self.attention_layers:
                layer.crop(num_slots - self.live.shape[1])
            self.live = self.live[:, :num_slots]

    def _squeeze(self) -> None:
        """Move the live slots of every sequence to the front, in order."""
        longest = int(self.lengths.max())
        order = (~self.live).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
        for layer in self.attention_layers:
            for name in _SLOT_TENSORS:
                if (part := getattr(layer, name, None)) is not None:
                    setattr(layer, name, _take_slots(part, order))
        self.live = torch.arange(longest) < self.lengths[:, None]


def _take_slots(part: Tensor, order: Tensor) -> Tensor:
    """part [B, ..., slots, width] at slots order [B, S]."""
    index = order.to(part.device).view(len(order), *[1] * (part.ndim - 3), -1, 1)
    return part.gather(-2, index.expand(*part.shape[:-2], -1, part.shape[-1]))


Reach = Literal["full", "window", "chunk"]


@dataclass(frozen=True)
class LayerMask:
    """How far back one kind of attention layer looks.

    reach: "full": all positions; "window": the last `size` positions, the query's own among them; "chunk": positions
    of the query's own chunk of `size` positions.
    """

    reach: Reach
    size: int = 0

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [B, T, S]: which keys at positions [B, S] the queries at positions [B, T] may see; causality apart."""
        if self.reach == "window":
            return queries[:, :, None] - keys[:, None, :] < self.size
        return queries[:, :, None] // self.size == keys[:, None, :] // self.size


_FULL = LayerMask("full")
_ALIASES = {"full": "full_attention", "sparse": "full_attention", "window": "sliding_attention"}
"""What a layer sees, by LAYER_KINDS -> the name under which models look its mask up beside their own layer type."""


@dataclass(frozen=True)
class MaskPlan:
    """The masks that a model wants: one for all layers, or one for each name in `config.layer_types`."""

    by_type: dict[str, LayerMask | None]  # None: a layer type that takes no attention mask; "" alone: one for all

    @property
    def is_full(self) -> bool:
        """Whether every layer looks at all positions, so that transformers' own masks do as well."""
        return all(mask is None or mask.reach == "full" for mask in self.by_type.values())

    def build(self, causal: Tensor, queries: Tensor, keys: Tensor, dtype: torch.dtype, device: torch.device) -> Any:
        """What the model takes as `attention_mask`: additive masks [B, 1, T, S], by layer type where it has several.

        causal: bool [B, T, S], which keys may be seen at all. queries, keys: int64 positions [B, T] and [B, S].
        The masked value is finite: a row that sees nothing must not turn into NaN.
        """

        def additive(mask: LayerMask) -> Tensor:
            visible = causal if mask.reach == "full" else causal & mask.visible(queries, keys)
            zeros = torch.zeros(visible.shape, dtype=dtype)
            return zeros.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1).to(device)

        built = {mask: additive(mask) for mask in set(self.by_type.values()) if mask is not None}
        if "" in self.by_type:
            return built[self.by_type[""]]  # type: ignore[index]
        return {name: None if mask is None else built[mask] for name, mask in self.by_type.items()}


def mask_plan(config: Any, location: str) -> MaskPlan:
    """Read a text model's configuration; raises UserError for a kind of layer that has no mask here."""
    masks = {
        "full": _FULL,
        "sparse": _FULL,
        "window": _cut("window", getattr(config, "sliding_window", None)),
        "chunk": _cut("chunk", getattr(config, "attention_chunk_size", None)),
    }
    by_type: dict[str, LayerMask | None] = {}
    for name in dict.fromkeys(layer_types_of(config)):
        if name not in LAYER_KINDS and name not in WITHOUT_ATTENTION:
            raise UserError(f"{location}: layers of type {name} are not supported")
        reach, _, state = LAYER_KINDS.get(name, "state").partition(" and ")
        mask = masks.get(reach)
        by_type |= {name: mask, _ALIASES.get(reach, name): mask}
        if mask is None or state:
            by_type["linear_attention"] = None
    cuts = set(by_type.values())
    return MaskPlan({"": next(iter(cuts))} if len(cuts) == 1 else by_type)


def _cut(reach: Reach, size: int | None) -> LayerMask:
    return LayerMask(reach, int(size)) if size else _FULL
