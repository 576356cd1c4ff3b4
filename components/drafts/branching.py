"""Draft trees of a drafter with one block that is fed its own output (EAGLE-1, EAGLE-3, HASS).

A chain keeps its draft tokens in the cache rows after the committed positions. A tree does the same with one row per
node, and a mask marks which of these rows are a node's ancestors. Siblings share a rotary position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from components.drafts.ancestry import Ancestry
from components.drafts.cached_block import CachedBlock, KvCache
from components.drafts.draft import Branches


class BlockState(Protocol):
    """State of such a drafter: cache rows from num_columns on are scratch."""

    cache: KvCache
    num_columns: int


@final
class BlockBranches(Branches):
    """One cache row per node. H = hidden size, C = committed positions, M = nodes so far, F = new nodes."""

    def __init__(
        self,
        block: CachedBlock,
        state: BlockState,
        output: Tensor,
        inputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """output: [1, H], the block's output at the last committed position.

        inputs: (tokens [F], the parents' block outputs [F, H]) -> (qkv, residual [F, H]) as `CachedBlock.run` takes
        them. logits: block output [F, H] -> [F, N].
        """
        self.block, self.state, self.inputs, self.logits = block, state, inputs, logits
        self.outputs = output  # [1 + M, H]; row 0 is the root's
        self.ancestry = Ancestry()
        self.root = logits(output)[0]

    @torch.inference_mode()
    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        """See Branches. A node of depth d sits at position C + d - 1, as the d-th draft token of a chain does."""
        block, state, device = self.block, self.state, self.outputs.device
        num_before, count = len(self.ancestry.depths), len(parents)
        depth, start = self.ancestry.add(parents), state.num_columns + num_before
        state.cache = block.with_room(state.cache, start + count)
        parent_outputs = self.outputs.index_select(0, torch.tensor([parent + 1 for parent in parents], device=device))
        qkv, residual = self.inputs(tokens.to(device), parent_outputs)
        if count == 1 and depth == num_before + 1:  # the tree is a chain so far and needs no mask
            output = block.run(qkv, residual, state.cache, start, last_only=True)
        else:
            positions = [state.num_columns + depth - 1] * count
            visible = self.ancestry.visible(num_before)
            output = block.run_branches(qkv, residual, state.cache, start, positions, visible)
        self.outputs = torch.cat((self.outputs, output))
        return self.logits(output)
