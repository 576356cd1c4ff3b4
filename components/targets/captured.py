"""Records work of a fixed shape once as a CUDA graph and replays it: one launch instead of hundreds.

A decoding pass over few rows is bound by launching its operators, not by running them. A graph launches them all at
once, provided that the work does not depend on a number on the host: lengths and tokens are written into tensors before
each replay, and the next replay overwrites the result tensors. Without a CUDA device the same work simply runs, so that
it can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

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
