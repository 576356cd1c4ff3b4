"""A FastTarget whose small passes (one row, or a verification of k + 1 rows) are CUDA graphs over a static cache.

All inputs that change from pass to pass are on the device: the tokens, and the column of each row, which gives its
rotation, its place in the cache and its mask. Passes of other kinds (prefill, ragged ends, trees) are not recorded.
A pass attends to a window of the cache (cuda_graphs.py), masked behind each row's own column. On a CPU the same static
pass runs without being recorded, which is slower than the ordinary one, so that tests can cover it.

Records work of a fixed shape once as a CUDA graph and replays it: one launch instead of hundreds.

A decoding pass over few rows is bound by launching its operators, not by running them. A graph launches them all at
once, provided that the work does not depend on a number on the host: lengths and tokens are written into tensors before
each replay, and the next replay overwrites the result tensors. Without a CUDA device the same work simply runs, so that
it can be tested anywhere.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from components.targets.forward.llama import FastTarget, Geometry
from components.targets.forward.static_cache import StaticCache, View
from components.targets.interface import AbstractCache, TargetPass, TreeRows, WrappedTarget
from components.targets.shape import TapLayers

MAX_RECORDED_ROWS = 32  # of one sequence in a pass that is recorded; longer ones are prefill, bound by arithmetic


class GraphedTarget(WrappedTarget):
    """`inner` with recorded small passes; decodes the same tokens up to the rounding of other kernels."""

    inner: FastTarget

    def __init__(self, inner: FastTarget) -> None:
        super().__init__(inner)
        self.kernel = f"{inner.kernel}+graphs"
        self._pool: dict[tuple[int, int], list[tuple[Tensor, weakref.ref[StaticCache]]]] = {}
        self._passes: dict[tuple[int, int, int, bool | TapLayers], _StaticPass] = {}

    def new_cache(self, batch_size: int, capacity: int) -> StaticCache:
        """As AbstractTarget; reuses the memory of a released cache of this size and frees other unused memory.

        Graphs are bound to addresses, and recording one takes longer than many passes.
        """
        for index, (kv, holder) in enumerate(self._pool.get((batch_size, capacity), [])):
            if holder() is None:
                cache = StaticCache(kv)
                self._pool[batch_size, capacity][index] = (kv, weakref.ref(cache))
                return cache
        self._free_unused()
        cache = self.inner.new_cache(batch_size, capacity)
        self._pool.setdefault((batch_size, capacity), []).append((cache.kv, weakref.ref(cache)))
        return cache

    @torch.inference_mode()
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
        assert isinstance(cache, StaticCache)
        num_rows, features = ids.shape[1], self.tapped_by(features) or bool(features)
        ordinary = num_valid is not None or tree is not None or num_rows > MAX_RECORDED_ROWS or logits == "none"
        longest = int(cache.lengths.max()) + num_rows
        if ordinary or longest == num_rows or not self._has_pooled_memory(cache):
            return self.inner.forward(ids, cache, num_valid=num_valid, logits=logits, features=features, tree=tree)
        assert longest <= cache.capacity, f"{longest} columns do not fit a cache of {cache.capacity}"
        window = window_length(longest, cache.capacity)
        key = (cache.kv.data_ptr(), num_rows, window, features)
        static = self._passes.get(key)
        if static is None:
            static = self._passes[key] = _StaticPass(self.inner, cache.kv, num_rows, window, features)
        out = static(ids, cache.lengths)
        cache.lengths = cache.lengths + num_rows
        scores = out.logits if logits == "all" or out.logits is None else out.logits[:, -1:]
        # Cloned, since the next replay overwrites these tensors and a drafter may keep features for longer.
        last = out.last if features else None
        return TargetPass(*(None if part is None else part.clone() for part in (scores, out.taps, last)))

    def _free_unused(self) -> None:
        """Drop released caches, and the graphs over them."""
        self._pool = {size: [one for one in entries if one[1]() is not None] for size, entries in self._pool.items()}
        addresses = {kv.data_ptr() for entries in self._pool.values() for kv, _ in entries}
        self._passes = {key: entry for key, entry in self._passes.items() if key[0] in addresses}

    def _has_pooled_memory(self, cache: StaticCache) -> bool:
        """Whether the cache still has the memory from `new_cache`; a batch that has shrunk has other memory."""
        return any(kv is cache.kv for kv, _ in self._pool.get((cache.kv.shape[1], cache.capacity), []))


class _StaticPass:
    """T rows of B sequences over the first `window` columns of one cache."""

    def __init__(self, target: FastTarget, kv: Tensor, num_rows: int, window: int, features: bool | TapLayers) -> None:
        num_sequences, device = kv.shape[1], target.device
        self.target, self.cache, self.features = target, StaticCache(kv), features
        self.ids = torch.zeros(num_sequences, num_rows, dtype=torch.int64, device=device)
        self.columns = torch.zeros_like(self.ids)
        self.rotations = target.rotations(kv.shape[3])
        self.window_columns = torch.arange(window, device=device)
        self.places = torch.arange(num_sequences, device=device).repeat_interleave(num_rows)
        self.rows = torch.arange(num_rows, device=device).repeat(num_sequences)
        self.offsets = torch.arange(num_rows)
        self.recorded = RecordedWork(self._run, device)

    def __call__(self, ids: Tensor, lengths: Tensor) -> TargetPass:
        self.ids.copy_(ids, non_blocking=True)
        self.columns.copy_(lengths[:, None] + self.offsets, non_blocking=True)
        return self.recorded()

    def _run(self) -> TargetPass:
        window, kv_heads = len(self.window_columns), self.target.shape.num_key_value_heads
        kv, windows = self.cache.kv[:, :, :, :window], self.target.architecture.windows
        views = {size: View(0, self._mask(size, kv)) for size in set(windows)}
        geometry = Geometry(
            rotations=self.target.per_layer([table[self.columns] for table in self.rotations]),
            slots=None,
            scatter=(self.places, self.rows, self.places, self.columns.flatten()),
            keys=kv[:, :, :kv_heads].unbind(0),
            values=kv[:, :, kv_heads:].unbind(0),
            views=tuple(views[size] for size in windows),
        )
        x = self.target.embed(self.ids.flatten())
        batch, rows = self.ids.shape
        return self.target.run_layers(x, geometry, self.cache, batch, rows, logits=True, features=self.features)

    def _mask(self, size: int, kv: Tensor) -> Tensor:
        """[B, 1, T, window]: -inf for columns after each row's own, and for those before its `size` positions."""
        columns = self.columns[:, None, :, None]
        hidden = self.window_columns > columns
        if size:
            hidden = hidden | (self.window_columns <= columns - size)
        return torch.zeros(hidden.shape, dtype=kv.dtype, device=kv.device).masked_fill_(hidden, -math.inf)


Result = TypeVar("Result")
WARM_UP = 3  # runs before recording: libraries allocate and choose kernels on their first calls


class RecordedWork(Generic[Result]):
    """Calls `work`; on a CUDA device the first call records it and all calls replay the graph."""

    def __init__(self, work: Callable[[], Result], device: torch.device) -> None:
        """work: reads and writes the same tensors every time; running it more than once must change nothing."""
        self._work, self._device = work, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Result | None = None

    def __call__(self) -> Result:
        """The results; on a CUDA device valid until the next call."""
        if self._device.type != "cuda":
            return self._work()
        if self._graph is None:
            self._record()
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        return self._result

    def _record(self) -> None:
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = self._work()


def window_length(columns: int, capacity: int, step: int = 256) -> int:
    """The number of cache columns that a static pass attends to: rounded up, so that few lengths need their own graph.

    Doubling steps: attention over a window reads at most twice the cache that is filled, and 32k needs eight graphs.
    """
    window = step
    while window < columns:
        window *= 2
    return min(window, capacity)
