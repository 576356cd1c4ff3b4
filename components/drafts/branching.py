"""Guesses that branch, for a drafter of one block fed by its own output (EAGLE-1, EAGLE-3, HASS).

A chain keeps its guesses in the rows behind the committed columns of the drafter's cache. A tree does the same with one
row a node, and a mask says which of these rows are a node's ancestors. Siblings share a rotary position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from components.drafts.cached_block import CachedBlock, KvCache
from components.drafts.draft import Branches


@final
class Ancestry:
    """Which nodes lie on the path to each node. Nodes are numbered from 0 as they are added; -1 is the root."""

    def __init__(self, device: torch.device) -> None:
        self.depths: list[int] = []  # of every node, 1: child of the root
        self.paths = torch.zeros(0, 0, dtype=torch.bool, device=device)  # [M, M]: row i sees its ancestors and itself

    def add(self, parents: Sequence[int]) -> int:
        """Add one node for each parent, all of one depth, which is returned."""
        before, count = len(self.depths), len(parents)
        depths = {1 if parent < 0 else self.depths[parent] + 1 for parent in parents}
        assert len(depths) == 1 and max(parents) < before, "nodes are added a level at a time, after their parents"
        paths = torch.zeros(before + count, before + count, dtype=torch.bool, device=self.paths.device)
        paths[:before, :before] = self.paths
        if before and parents[0] >= 0:
            paths[before:, :before] = self.paths[list(parents)]
        paths[range(before, before + count), range(before, before + count)] = True
        self.paths = paths
        depth = depths.pop()
        self.depths += [depth] * count
        return depth


class BlockState(Protocol):
    """What the state of such a drafter has: cache rows from num_columns on are scratch."""

    cache: KvCache
    num_columns: int


@final
class BlockBranches(Branches):
    """One block, one row a node. H = hidden size, C = committed columns, M = nodes so far, F = new nodes."""

    def __init__(
        self,
        block: CachedBlock,
        state: BlockState,
        output: Tensor,
        inputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """output: [1, H], the block's output at the last committed column.

        inputs: (tokens [F], the parents' block outputs [F, H]) -> what `CachedBlock.run` takes: (qkv, residual [F, H]).
        logits: block output [F, H] -> [F, N].
        """
        self.block, self.state, self.inputs, self.logits = block, state, inputs, logits
        self.outputs = output  # [1 + M, H]; row 0 is the root's
        self.ancestry = Ancestry(output.device)
        self.root = logits(output)[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """See Branches. A node of depth d sits at position C + d - 1, as the d-th guess of a chain does."""
        committed, before, count = self.state.num_columns, len(self.ancestry.depths), len(parents)
        position = committed + self.ancestry.add(parents) - 1
        device = self.outputs.device
        self.state.cache = self.block.with_room(self.state.cache, committed + before + count)
        qkv, residual = self.inputs(tokens.to(device), self.outputs[[parent + 1 for parent in parents]])
        visible = torch.ones(count, committed + before + count, dtype=torch.bool, device=device)
        visible[:, committed:] = self.ancestry.paths[before:]
        positions = torch.full((count,), position, device=device)
        output = self.block.run_branches(qkv, residual, self.state.cache, committed + before, positions, visible)
        self.outputs = torch.cat((self.outputs, output))
        return self.logits(output)
