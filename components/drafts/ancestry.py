"""Which rows of a tree lie on the way to each row: bit sets on the host, and one tensor when a pass needs them.

A round makes several trees of a few dozen nodes, so what is said about them row by row must cost next to nothing:
an integer a row, one "or" to add one, and a handful of numpy calls to lay all of them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor


def ancestor_sets(parents: Sequence[int]) -> list[int]:
    """For every row itself and its ancestors, as the bits of an integer. Parents come first; -1: there is none."""
    sets: list[int] = []
    for row, parent in enumerate(parents):
        sets.append(1 << row | (sets[parent] if parent >= 0 else 0))
    return sets


def as_mask(sets: Sequence[int], size: int) -> Tensor:
    """Sets of numbers below `size` as bool [sets, size] on the CPU: true where set i holds number j."""
    width = (size + 7) // 8
    packed = np.frombuffer(b"".join(one.to_bytes(width, "little") for one in sets), np.uint8)
    bits = np.unpackbits(packed.reshape(len(sets), width), axis=1, count=size, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


@final
class Ancestry:
    """Which nodes lie on the path to each node. Nodes are numbered from 0 as they are added; -1 is the root."""

    def __init__(self) -> None:
        self.depths: list[int] = []  # of every node, 1: child of the root
        self.sets: list[int] = []  # of every node: itself and its ancestors

    def add(self, parents: Sequence[int]) -> int:
        """Add one node for each parent, all of one depth, which is returned."""
        before = len(self.depths)
        depths = {1 if parent < 0 else self.depths[parent] + 1 for parent in parents}
        assert len(depths) == 1 and max(parents) < before, "nodes are added a level at a time, after their parents"
        self.sets += [1 << before + i | (self.sets[parent] if parent >= 0 else 0) for i, parent in enumerate(parents)]
        self.depths += [*depths] * len(parents)
        return self.depths[-1]

    def visible(self, first: int = 0) -> Tensor:
        """What nodes `first`.. see of all M nodes, themselves among them: bool [M - first, M] on the CPU."""
        return as_mask(self.sets[first:], len(self.sets))
