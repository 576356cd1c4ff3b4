"""The interface of a target: rows in, logits and features out, over a KV cache.

Names used everywhere: tokens are x_0, x_1, ...; column t is the position of x_t. A pass over it gives
  logits[t]: the distribution of x_{t+1};
  taps[t]:   the tapped layers' HF hidden_states at column t side by side, width N * hidden_size, N = number of taps:
             the target's `tap_layers` (shape.taps_of unless set), or those that a pass names;
  last[t]:   the last layer's output BEFORE the final norm, width hidden_size.
Shapes: B = sequences, T = rows of this pass, V = vocabulary, H = hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, final

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.shape import TapLayers, TargetShape


class TargetPass(NamedTuple):
    """Outputs of one pass; those not requested are None."""

    logits: Tensor | None  # [B, T, V] float32, or [B, 1, V] of the last row only
    taps: Tensor | None  # [B, T, N * H]
    last: Tensor | None  # [B, T, H], before the final norm


class TreeRows(NamedTuple):
    """Positions and mutual visibility of the rows of a pass that are no chain: a draft tree or a lookahead window.

    Row i always sees all cached columns of its sequence, and must see itself.
    """

    depths: Tensor  # int64 [B, T], on the CPU: row j sits at position lengths[b] + depths[b, j]; the first row's is 0
    visible: Tensor  # bool [B, T, T], on the CPU: row i (second axis) sees row j (third axis) of this pass


class AbstractCache(ABC):
    """Keys and values of B sequences, allocated once. `lengths[b]` rows of sequence b are valid."""

    lengths: Tensor  # [B] int64, on the CPU
    capacity: int

    @abstractmethod
    def put(self, sequences: Sequence[int], other: AbstractCache) -> None:
        """Replace these sequences by those of `other` (of the same target), in order. Rows are copied."""

    @abstractmethod
    def truncate(self, lengths: Tensor) -> None:
        """Drop rows at and beyond lengths[b] (int64 [B]); nothing is moved or freed."""

    @abstractmethod
    def keep(self, start: Tensor, rows: Sequence[Sequence[int]]) -> None:
        """After a pass with TreeRows: keep these of the rows appended since start[b], in this order, drop the others.

        start: int64 [B], the lengths before the pass. rows: for each sequence ascending row numbers of the pass; row
        rows[b][i] becomes column start[b] + i, which must be the position it was computed at.
        """

    @abstractmethod
    def select(self, sequences: Sequence[int]) -> None:
        """Keep only these sequences, in this order; rows are moved."""

    @abstractmethod
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence takes, over all layers."""


NEVER: Final = -1e9
"""The logit of a token that is never said. A number, since minus infinity times a probability of 0 is none."""


class AbstractTarget(ABC):
    """A causal LM ready to decode. Load one with `targets.load.open_target`."""

    shape: TargetShape
    folder: Path | None = None  # of the checkpoint it was opened from
    device: torch.device
    dtype: torch.dtype
    kernel: str  # of its linear layers: see load.open_target
    verifies_trees: bool = True  # False where layers keep a state, which follows one text
    suppressed: Tensor | None = None  # int64, on its device: tokens that its generation_config.json never lets out
    _tap_layers: TapLayers | None = None

    @property
    def tap_layers(self) -> TapLayers:
        """The layers that a pass with `features` taps; they can be set, to different ones of 1 .. num_layers - 1."""
        return self.shape.tap_layers if self._tap_layers is None else self._tap_layers

    @tap_layers.setter
    def tap_layers(self, layers: TapLayers) -> None:
        assert all(0 < layer < self.shape.num_layers for layer in layers), f"{layers} of {self.shape.num_layers} layers"
        self._tap_layers = layers

    def tapped_by(self, features: bool | TapLayers) -> TapLayers:
        """The layers that a pass taps with this argument `features`."""
        if isinstance(features, bool):
            return self.tap_layers if features else ()
        return features

    def silence(self, logits: Tensor) -> Tensor:
        """Give the suppressed tokens of logits [..., V] no chance, in place; the logits of every pass are silenced."""
        return logits if self.suppressed is None else logits.index_fill_(-1, self.suppressed, NEVER)

    @abstractmethod
    def new_cache(self, batch_size: int, capacity: int) -> AbstractCache:
        """An empty cache for `batch_size` sequences of at most `capacity` tokens each."""

    @abstractmethod
    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool | TapLayers = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        """Append rows to the cache and return their outputs.

        ids: int64 [B, T]; row j of sequence b is column cache.lengths[b] + j.
        num_valid: int64 [B]; rows at and beyond num_valid[b] are padding: cache.lengths does not count them and their
            outputs are undefined ("last" is then row num_valid[b] - 1). None: all rows count.
        features: also return taps and last; layers: tap these instead of `tap_layers`.
        tree: positions and mutual visibility of the rows, when they are no chain. The cache must then be told which
            rows to `keep` (or be truncated to where it was) before the next pass.
        """

    @abstractmethod
    def final_norm(self, last: Tensor) -> Tensor:
        """The target's final norm, [..., H] -> [..., H]."""

    @abstractmethod
    def unembed(self, normed: Tensor) -> Tensor:
        """The target's LM head, [..., H] -> [..., V] float32, as its weights have it: not silenced."""

    @property
    @abstractmethod
    def embedding(self) -> Tensor:
        """The token embedding matrix [V, H], in the target's dtype or one of fewer bits that it is stored in."""


def check_verifies_trees(target: AbstractTarget) -> None:
    """Raises UserError for a target that can verify chains only."""
    if not target.verifies_trees:
        raise UserError(
            f"{target.shape.architecture} has layers that keep a state of one text, so it cannot verify draft trees or"
            " lookahead's guesses: leave trees empty, and take another method than lookahead"
        )


class WrappedTarget(AbstractTarget):
    """A target around another one, which does all that a subclass does not do itself."""

    def __init__(self, inner: AbstractTarget) -> None:
        self.inner = inner
        self.shape, self.folder, self.device = inner.shape, inner.folder, inner.device
        self.dtype, self.kernel, self.verifies_trees = inner.dtype, inner.kernel, inner.verifies_trees
        self.tap_layers, self.suppressed = inner.tap_layers, inner.suppressed

    def new_cache(self, batch_size: int, capacity: int) -> AbstractCache:
        return self.inner.new_cache(batch_size, capacity)

    def final_norm(self, last: Tensor) -> Tensor:
        return self.inner.final_norm(last)

    def unembed(self, normed: Tensor) -> Tensor:
        return self.inner.unembed(normed)

    @property
    def embedding(self) -> Tensor:
        return self.inner.embedding


def tapping(target: AbstractTarget, layers: TapLayers) -> AbstractTarget:
    """The target with these taps; itself where it has them already."""
    return target if target.tap_layers == layers else TappedTarget(target, layers)


@final
class TappedTarget(WrappedTarget):
    """A target whose passes tap other layers than those of the one it wraps, which several drafters may share."""

    def __init__(self, inner: AbstractTarget, layers: TapLayers) -> None:
        super().__init__(inner)
        self.tap_layers = layers

    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool | TapLayers = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        """As AbstractTarget."""
        taps = self.tapped_by(features) or bool(features)
        return self.inner.forward(ids, cache, num_valid=num_valid, logits=logits, features=taps, tree=tree)
