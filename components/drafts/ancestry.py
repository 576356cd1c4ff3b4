"""The tree mask: the ancestors of each row, as bit sets on the host and as one bool tensor for a forward pass.

A round makes several trees of a few dozen nodes, so the bookkeeping for one row must cost next to nothing: one integer
per row, one "or" to add a row, and a handful of numpy calls to unpack all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor


def ancestor_sets(parents: Sequence[int]) -> list[int]:
    """The set of each row and its ancestors, as the bits of an integer. Parents come first; a parent of -1 is none."""
    sets: list[int] = []
    for row, parent in enumerate(parents):
        sets.append(1 << row | (sets[parent] if parent >= 0 else 0))
    return sets


def as_mask(sets: Sequence[int], size: int) -> Tensor:
    """Bit sets over numbers below `size` -> bool [sets, size] on the CPU: true where set i contains number j."""
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join(bits_of_row.to_bytes(width, "little") for bits_of_row in sets), np.uint8)
    bits = np.unpackbits(packed.reshape(len(sets), width), axis=1, count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


@final
class Ancestry:
    """The ancestors of every tree node. Nodes are numbered from 0 in the order they are added; -1 is the root."""

    def __init__(self) -> None:
        self.depths: list[int] = []  # of every node, 1: child of the root
        self.sets: list[int] = []  # of every node: itself and its ancestors

    def add(self, parents: Sequence[int]) -> int:
        """Add one node for each parent; all must have the same depth, which is returned."""
        before = len(self.depths)
        depths = {1 if parent < 0 else self.depths[parent] + 1 for parent in parents}
        assert len(depths) == 1 and max(parents) < before, "nodes are added a level at a time, after their parents"
        self.sets += [1 << before + i | (self.sets[parent] if parent >= 0 else 0) for i, parent in enumerate(parents)]
        self.depths += [*depths] * len(parents)
        return self.depths[-1]

    def visible(self, first: int = 0) -> Tensor:
        """Which of all M nodes the nodes `first`.. see (ancestors and themselves): bool [M - first, M], CPU."""
        return as_mask(self.sets[first:], len(self.sets))
