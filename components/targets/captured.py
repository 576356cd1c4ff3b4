"""Work of a fixed shape, recorded once as a CUDA graph and replayed: what is launched costs one call, not hundreds.

A decoding pass over few rows is bound by launching its operators, not by running them. A graph holds them all, provided
that nothing in the work depends on a number on the host: lengths and tokens lie in tensors that are filled before each
replay, and results come out in tensors that the next replay overwrites. Where there is no CUDA device the same work
simply runs, so that what a graph would hold can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
WARM_UP = 3  # runs before recording: libraries allocate and choose kernels on their first calls


class Captured(Generic[Result]):
    """Calls `work`; on a CUDA device by replaying what its first call recorded."""

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


def window_of(columns: int, capacity: int, step: int = 256) -> int:
    """Columns that a static pass looks at: the needed ones rounded up, so that few lengths need a graph of their own.

    Doubling steps: attention over a window reads at most twice the cache that is filled, and 32k needs eight graphs.
    """
    window = step
    while window < columns:
        window *= 2
    return min(window, capacity)
