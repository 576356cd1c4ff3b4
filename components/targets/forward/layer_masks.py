"""Attention masks by position, one for each kind of attention layer of a transformers model.

transformers computes its masks from slot numbers. The slots of our caches are not positions (dropped draft tokens leave
dead slots behind), so windows and chunks are cut here, from the positions of queries and keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.shape import LAYER_KINDS, WITHOUT_ATTENTION, layer_types_of

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
            seen = causal if mask.reach == "full" else causal & mask.visible(queries, keys)
            zeros = torch.zeros(seen.shape, dtype=dtype)
            return zeros.masked_fill_(~seen, torch.finfo(dtype).min).unsqueeze(1).to(device)

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
        seen, _, state = LAYER_KINDS.get(name, "state").partition(" and ")
        mask = masks.get(seen)
        by_type |= {name: mask, _ALIASES.get(seen, name): mask}
        if mask is None or state:
            by_type["linear_attention"] = None
    cuts = set(by_type.values())
    return MaskPlan({"": next(iter(cuts))} if len(cuts) == 1 else by_type)


def _cut(reach: Reach, size: int | None) -> LayerMask:
    return LayerMask(reach, int(size)) if size else _FULL
