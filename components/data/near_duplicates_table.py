"""The sketches of all parts as one table: columns of numbers in memory, shingles and band hashes on disk.

Files are mapped into memory, so hashes of a band and shingles of candidates occupy only the page cache.
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
    """The sketches of all parts as one table; rows are numbered through all files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._stack = contextlib.ExitStack()
        self._readers = [self._open(file) for file in self.files]
        self._lists = [
            (number, index) for number, reader in enumerate(self._readers) for index in range(reader.num_record_batches)
        ]
        ends = [self._batch(*at).column("shingles").offsets.to_numpy() for at in self._lists]
        self.starts: Places = np.cumsum([0, *(len(end) - 1 for end in ends)])
        self._begins: Places = np.concatenate([np.empty(0, np.int64), *(end[:-1] for end in ends)])
        self.num_shingles: Places = np.concatenate([np.empty(0, np.int64), *(np.diff(end) for end in ends)])

    def __enter__(self) -> Sketches:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.clear()
        self._stack.close()

    @property
    def num_rows(self) -> int:
        """Number of rows in all parts."""
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers for all rows."""
        parts = [self._numbers(at, name) for at in self._lists]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def digests(self) -> NDArray[Any]:
        """The digests of whole texts as two 64-bit halves, [num_rows, 2]."""
        buffers = [self._batch(*at).column("digest").buffers()[1] for at in self._lists]
        sizes = np.diff(self.starts)
        halves = [
            np.frombuffer(buffer, np.uint64, 2 * size).reshape(-1, 2)
            for buffer, size in zip(buffers, sizes, strict=True)
        ]
        return np.concatenate([np.empty((0, 2), np.uint64), *halves])

    def in_range(self, name: str, selected: Marks, share: int, shares: int) -> tuple[Places, NDArray[np.uint64]]:
        """(rows, keys) of the selected rows whose key lies in the share-th of `shares` equal ranges."""
        rows, keys = [], []
        width = np.uint64((1 << 64) // shares) if shares > 1 else None
        for number, at in enumerate(self._lists):
            hashes = self._numbers(at, name)
            in_file = selected[self.starts[number] : self.starts[number + 1]]
            if width is not None:
                in_file = in_file & (np.minimum(hashes // width, np.uint64(shares - 1)) == np.uint64(share))
            positions = np.flatnonzero(in_file)
            rows.append(positions + self.starts[number])
            keys.append(hashes[positions])
        return np.concatenate([np.empty(0, np.int64), *rows]), np.concatenate([np.empty(0, np.uint64), *keys])

    def shingles(self, rows: Places) -> tuple[Small, Places]:
        """(the sorted shingles of these rows, at least one, one after the other; their offsets)."""
        lengths, begins = self.num_shingles[rows], self._begins[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shingles = np.empty(offsets[-1], np.uint32)
        batch_of_row = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(batch_of_row, kind="stable")
        edges = np.flatnonzero(np.append(True, np.diff(batch_of_row[order]) > 0))
        for first, last in zip(edges, np.append(edges[1:], len(rows)), strict=True):
            of_batch = order[first:last]
            values = self._batch(*self._lists[batch_of_row[of_batch[0]]]).column("shingles").values.to_numpy()
            sizes = lengths[of_batch]
            shingles[_ranges(offsets[of_batch], sizes)] = values[_ranges(begins[of_batch], sizes)]
        return shingles, offsets

    def matched(self, rows: Places) -> dict[int, tuple[float, str]]:
        """Row -> (share, matched) of contaminated rows."""
        row_set, matches = set(rows.tolist()), {}
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1):
            batch, start = self._batch(*self._lists[number]), int(self.starts[number])
            for index in np.flatnonzero(batch.column("item").to_numpy() != CLEAN).tolist():
                if start + index in row_set:
                    matches[start + index] = (
                        batch.column("share")[index].as_py(),
                        batch.column("matched")[index].as_py(),
                    )
        return matches

    def _open(self, file: Path) -> Any:
        import pyarrow

        return pyarrow.ipc.open_file(self._stack.enter_context(pyarrow.memory_map(str(file))))

    def _batch(self, number: int, index: int) -> Any:
        return self._readers[number].get_batch(index)

    def _numbers(self, at: tuple[int, int], name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._batch(*at).column(name).to_numpy()
        return values


def _ranges(begins: Places, lengths: Places) -> Places:
    """The numbers of all ranges begins[i] to begins[i] + lengths[i], one range after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - (ends - lengths), lengths)
