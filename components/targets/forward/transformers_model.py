"""Any Hugging Face causal LM as a target: slower than our own forward pass, but it runs the model's own code.

transformers' DynamicCache appends the same number of slots to every sequence, but targets need ragged batches and
truncation. So a slot is not a column: beside the cache, `live` marks the slots of each sequence that hold a token.
Dead slots (padding, rejected drafts) are hidden by the 2-D attention mask, dropped when last in every sequence, and
squeezed out when there are too many. Columns reach the model as explicit position_ids.
Forward hooks on the decoder layers catch the taps and the last layer's output, before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from components.contract import UserError
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows
from components.targets.shape import MIN_LAYERS, TargetShape, kv_bytes_per_token
from components.text import message_of

_SPARE_SLOTS = 64
"""Dead slots tolerated before the cache is squeezed."""


class SlotCache(AbstractCache):
    """A DynamicCache and, for each sequence, which of its slots are live. Live slots are in column order."""

    def __init__(self, cache: Any, batch_size: int, capacity: int, bytes_per_token: int) -> None:
        self.cache = cache
        self.capacity = capacity
        self.lengths = torch.zeros(batch_size, dtype=torch.int64)
        self.live = torch.zeros(batch_size, 0, dtype=torch.bool)  # [B, slots], on the CPU
        self._bytes_per_token = bytes_per_token

        self.takes_others = all(type(layer) is DynamicLayer for layer in cache.layers)

    @torch.inference_mode()
    def put(self, sequences: Sequence[int], other: AbstractCache) -> None:
        """As AbstractCache; the slots of `other` become the first ones of these sequences, the rest are dead."""
        assert isinstance(other, SlotCache) and len(sequences) == len(other.lengths) and self.takes_others
        assert int(other.lengths.max()) <= self.capacity
        width, places = other.live.shape[1], torch.tensor(list(sequences))
        more = max(0, width - self.live.shape[1])
        self.live = torch.nn.functional.pad(self.live, (0, more))
        for layer, other_layer in zip(self.cache.layers, other.cache.layers, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(other_layer.keys, other_layer.values)
            for name in ("keys", "values"):
                part, new = getattr(layer, name), getattr(other_layer, name)
                if part.shape[0] != len(self.lengths):  # an empty layer
                    part = new.new_zeros(len(self.lengths), new.shape[1], 0, new.shape[3])
                part = torch.nn.functional.pad(part, (0, 0, 0, self.live.shape[1] - part.shape[2]))
                part[places.to(part.device), :, :width] = new
                setattr(layer, name, part)
        self.live[places] = False
        self.live[places, :width] = other.live
        self.lengths = self.lengths.index_copy(0, places, other.lengths)
        self._drop_dead_tail()

    def truncate(self, lengths: Tensor) -> None:
        assert bool((lengths <= self.lengths).all()) and bool((lengths >= 0).all())
        self.lengths = lengths.clone()
        self.live = self.live & (self.live.cumsum(dim=1) <= lengths[:, None])
        self._drop_dead_tail()

    @torch.inference_mode()
    def keep(self, start: Tensor, rows: Sequence[Sequence[int]]) -> None:
        """As AbstractCache; no row is moved, the slots of the others become dead."""
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
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.batch_select_indices(order.to(layer.keys.device))
        self._drop_dead_tail()

    def bytes_per_token(self) -> int:
        return self._bytes_per_token

    def append(self, valid: Tensor) -> None:
        """Record the slots of a finished pass. valid: bool [B, T]."""
        self.live = torch.cat([self.live, valid], dim=1)
        self.lengths = self.lengths + valid.sum(dim=1)
        self._drop_dead_tail()
        if self.live.shape[1] > int(self.lengths.max()) + _SPARE_SLOTS:
            self._squeeze()

    def _drop_dead_tail(self) -> None:
        used = self.live.any(dim=0).nonzero()
        keep = int(used[-1]) + 1 if used.numel() else 0
        dead = self.live.shape[1] - keep
        if dead:
            self.cache.crop(-dead)
            self.live = self.live[:, :keep]

    def _squeeze(self) -> None:
        """Move the live slots of every sequence to the front, in order."""
        longest = int(self.lengths.max())
        order = (~self.live).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = (_take_slots(part, order) for part in (layer.keys, layer.values))
        self.live = torch.arange(longest) < self.lengths[:, None]


def _take_slots(part: Tensor, order: Tensor) -> Tensor:
    """part [B, heads, slots, width] at slots order [B, S]."""
    index = order.to(part.device)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
    return part.gather(2, index)


class TransformersTarget(AbstractTarget):
    """A causal LM of transformers behind AbstractTarget."""

    def __init__(self, model: Any, shape: TargetShape, *, location: str) -> None:
        """model: an AutoModelForCausalLM in eval mode on its device.

        Raises UserError (naming `location`) if its logits are not `lm_head(norm(last))`, which drafters rely on.
        """
        self.model, self.shape = model, shape
        self.device, self.dtype = model.device, model.dtype
        self.kernel = "transformers"
        body = model.get_decoder()
        try:
            self._layers, self._norm, self._head = body.layers, body.norm, model.get_output_embeddings()
        except AttributeError as error:
            raise UserError(f"{location}: {shape.architecture} has no .layers and .norm as decoders have") from error
        self._bytes_per_token = kv_bytes_per_token(model.config, self.dtype.itemsize)
        self._caught: dict[int, Tensor] = {}
        self._catching = False
        # A draft model may have too few layers for taps; it needs none.
        self._taps = [tap - 1 for tap in shape.tap_layers] if shape.num_layers >= MIN_LAYERS else []
        for index in sorted({*self._taps, shape.num_layers - 1}):
            self._layers[index].register_forward_hook(self._catcher(index))
        self._check_head(location)

    def _catcher(self, index: int) -> Any:
        def catch(module: Any, inputs: Any, output: Any) -> None:
            if self._catching:
                self._caught[index] = output[0] if isinstance(output, tuple) else output

        return catch

    def _check_head(self, location: str) -> None:
        ids = torch.arange(4).clamp(max=self.shape.vocab_size - 1)[None]
        try:
            passed = self.forward(ids, self.new_cache(1, 4), features=True)
            assert passed.logits is not None and passed.last is not None
            recomputed = self.unembed(self.final_norm(passed.last))
        except Exception as error:  # sizes that do not match break each architecture in its own way
            raise UserError(f"{location}: transformers cannot run it ({message_of(error)})") from error
        if not bool(torch.isfinite(passed.logits).all()):
            raise UserError(f"{location}: config.json and the weights give NaN or infinity instead of logits")
        if not torch.allclose(recomputed, passed.logits, rtol=1e-2, atol=1e-2):
            raise UserError(
                f"{location}: {self.shape.architecture} scales or caps its logits after lm_head; only plain heads work"
            )

    def new_cache(self, batch_size: int, capacity: int) -> SlotCache:
        """As AbstractTarget, but memory grows with use; `capacity` is still enforced."""
        return SlotCache(DynamicCache(config=self.model.config), batch_size, capacity, self._bytes_per_token)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        assert isinstance(cache, SlotCache)
        num_sequences, num_rows = ids.shape
        valid = torch.ones(num_sequences, num_rows, dtype=torch.bool)
        if num_valid is not None:
            valid = torch.arange(num_rows) < num_valid[:, None]
        assert int((cache.lengths + valid.sum(dim=1)).max()) <= cache.capacity, "the cache is full"
        attendable = valid.clone()
        # attention over nothing gives NaN, which would spread from its slot to every later row
        attendable[:, 0] |= cache.lengths + valid.sum(dim=1) == 0
        columns = cache.lengths[:, None] + (torch.arange(num_rows) if tree is None else tree.depths)
        mask = torch.cat([cache.live, attendable], dim=1) if tree is None else self._tree_mask(cache, attendable, tree)
        last_row = (valid.sum(dim=1) - 1).clamp(min=0)
        keep: int | Tensor = 0
        if logits == "last":
            keep = last_row.unique().to(self.device)
        elif logits == "none":
            keep = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._catching = True
        try:
            output = self.model(
                input_ids=ids.to(self.device),
                attention_mask=None if tree is None and bool(mask.all()) else mask.to(self.device),
                position_ids=columns.to(self.device),
                past_key_values=cache.cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        finally:
            self._catching = False
        caught, self._caught = self._caught, {}
        cache.append(valid)
        scores = None if logits == "none" else output.logits.float()
        if logits == "last":
            assert scores is not None and isinstance(keep, Tensor)
            place = torch.searchsorted(keep, last_row.to(self.device))
            scores = scores[torch.arange(num_sequences, device=self.device), place].unsqueeze(1)
        if not features:
            return TargetPass(scores, None, None)
        taps = torch.cat([caught[tap] for tap in self._taps], dim=-1) if self._taps else None
        return TargetPass(scores, taps, caught[self.shape.num_layers - 1])

    def _tree_mask(self, cache: SlotCache, attendable: Tensor, tree: TreeRows) -> Tensor:
        """Additive mask [B, 1, T, slots + T]: 0 at live slots and visible rows of this pass, else the lowest number.

        It is finite, so that every attention implementation of transformers accepts it.
        """
        num_rows = tree.depths.shape[1]
        live = cache.live.unsqueeze(1).expand(-1, num_rows, -1)
        visible = torch.cat([live, tree.visible & attendable.unsqueeze(1)], dim=2)
        mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)
        return mask.unsqueeze(1)

    def final_norm(self, last: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `last`."""
        return self._norm(last)

    def unembed(self, normed: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `normed`."""
        return self._head(normed).float()

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight
