"""The sketches of all parts read as one table: columns of numbers in memory, shingles and band hashes from the disk.

Files are mapped into memory, so what is read once (the hashes of a band) or by few rows (the shingles of candidates)
takes no memory of its own: the system drops it when it is needed elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from components.data.near_duplicates_sketch import CLEAN

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Small = NDArray[np.uint32]
    Places = NDArray[np.int64]
    Marks = NDArray[np.bool_]


class Sketches:
    """The sketches of all parts as one table whose rows count on from file to file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._stack = contextlib.ExitStack()
        self._opened = [self._open(file) for file in self.files]
        self._lists = [
            (number, index) for number, opened in enumerate(self._opened) for index in range(opened.num_record_batches)
        ]
        ends = [self._batch(*at).column("shingles").offsets.to_numpy() for at in self._lists]
        self.starts: Places = np.cumsum([0, *(len(end) - 1 for end in ends)])
        self._begins: Places = np.concatenate([np.empty(0, np.int64), *(end[:-1] for end in ends)])
        self.num_shingles: Places = np.concatenate([np.empty(0, np.int64), *(np.diff(end) for end in ends)])

    def __enter__(self) -> Sketches:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers, over all rows."""
        parts = [self._numbers(at, name) for at in self._lists]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def digests(self) -> NDArray[Any]:
        """[num_rows, 2] 64-bit halves of the digests of whole texts."""
        buffers = [self._batch(*at).column("digest").buffers()[1] for at in self._lists]
        sizes = np.diff(self.starts)
        halves = [
            np.frombuffer(buffer, np.uint64, 2 * size).reshape(-1, 2)
            for buffer, size in zip(buffers, sizes, strict=True)
        ]
        return np.concatenate([np.empty((0, 2), np.uint64), *halves])

    def in_range(self, name: str, wanted: Marks, share: int, shares: int) -> tuple[Places, NDArray[np.uint64]]:
        """(row, key) of the wanted rows whose key lies in the share-th of `shares` equal ranges."""
        rows, keys = [], []
        width = np.uint64((1 << 64) // shares) if shares > 1 else None
        for number, at in enumerate(self._lists):
            found = self._numbers(at, name)
            here = wanted[self.starts[number] : self.starts[number + 1]]
            if width is not None:
                here = here & (np.minimum(found // width, np.uint64(shares - 1)) == np.uint64(share))
            place = np.flatnonzero(here)
            rows.append(place + self.starts[number])
            keys.append(found[place])
        return np.concatenate([np.empty(0, np.int64), *rows]), np.concatenate([np.empty(0, np.uint64), *keys])

    def shingles(self, rows: Places) -> tuple[Small, Places]:
        """The sorted shingles of these rows one after the other, and their offsets."""
        lengths, begins = self.num_shingles[rows], self._begins[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        found = np.empty(offsets[-1], np.uint32)
        where = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(where, kind="stable")
        edges = np.flatnonzero(np.append(True, np.diff(where[order]) > 0)) if len(rows) else np.empty(0, np.int64)
        for first, last in zip(edges, np.append(edges[1:], len(rows)), strict=True):
            chosen = order[first:last]
            values = self._batch(*self._lists[where[chosen[0]]]).column("shingles").values.to_numpy()
            found[_ranges(offsets[chosen], lengths[chosen])] = values[_ranges(begins[chosen], lengths[chosen])]
        return found, offsets

    def matched(self, rows: Places) -> dict[int, tuple[float, str]]:
        """Of contaminated rows: (share, matched)."""
        wanted, found = set(rows.tolist()), {}
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1):
            batch, start = self._batch(*self._lists[number]), int(self.starts[number])
            for index in np.flatnonzero(batch.column("item").to_numpy() != CLEAN).tolist():
                if start + index in wanted:
                    found[start + index] = (
                        batch.column("share")[index].as_py(),
                        batch.column("matched")[index].as_py(),
                    )
        return found

    def _open(self, file: Path) -> Any:
        import pyarrow

        return pyarrow.ipc.open_file(self._stack.enter_context(pyarrow.memory_map(str(file))))

    def _batch(self, number: int, index: int) -> Any:
        return self._opened[number].get_batch(index)

    def _numbers(self, at: tuple[int, int], name: str) -> NDArray[Any]:
        found: NDArray[Any] = self._batch(*at).column(name).to_numpy()
        return found


def _ranges(begins: Places, lengths: Places) -> Places:
    """begins[0], begins[0] + 1, ... lengths[0] of them, then those from begins[1]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - (ends - lengths), lengths)
