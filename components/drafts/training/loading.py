"""Batches on their way from storage to the device: the next one is read while the present one is trained on.

Only where training is on a GPU, whose step leaves this thread waiting. On a CPU the thread would take its time from the
step, and one more batch its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

import torch

from components.data.features.format import FeatureRow
from components.drafts.interface import Batch

Rows = list[FeatureRow]


@final
class Loader:
    """Loads the rows of a batch and moves it to a device; a context, since it may hold a thread."""

    def __init__(self, load: Callable[[Rows], Batch], device: torch.device, *, ahead: bool) -> None:
        self._load, self._device = load, device
        self._thread = ThreadPoolExecutor(1, "features") if ahead else None
        self._coming: tuple[Rows, Future[Batch]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def batch(self, rows: Rows, then: Rows | None) -> Batch:
        """The batch of these rows; `then` are the rows that are asked for next, if any are."""
        if self._thread is None:
            return self._load(rows).to(self._device)
        coming, self._coming = self._coming, None
        # Rows that nobody announced are read by the same thread: sources need not bear two readers.
        read = coming[1] if coming is not None and coming[0] == rows else self._thread.submit(self._load, rows)
        loaded = read.result()
        if then is not None:
            self._coming = (then, self._thread.submit(self._load, then))
        return loaded.to(self._device)


@dataclass(frozen=True)
class MicroBatches:
    """The parts of one batch, loaded one after the other."""

    loader: Loader
    parts: Sequence[Rows]
    after: Rows | None  # the first part of the next batch; None: there is none
    step: int  # the optimiser step

    def once(self, *, again: bool) -> Iterator[Batch]:
        """Yield every part; again: they will be asked for once more before the next batch."""
        if self.parts:
            following = [*self.parts[1:], self.parts[0] if again else self.after]
            for part, then in zip(self.parts, following, strict=True):
                yield self.loader.batch(part, then)._replace(step=self.step)
