"""A one-block drafter whose whole proposal, committing new positions and drafting k tokens, is one CUDA graph.

A proposal is at most k + 1 committed rows and k - 1 draft tokens fed back: dozens of tiny operators that cost a GPU
more to launch than to run. Here all k + 1 rows are always computed; those that are not committed write scratch rows of
the cache, which draft tokens, and later the next commit, overwrite before any row sees them. The first draft token
comes from the row of the last committed position, selected by an index on the device.

Greedy chains only; the prompt, sampling and the end of the cache use the drafter's ordinary path. On a CPU the same
static work runs without being captured (targets/forward/cuda_graphs.py).
"""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor

from components.drafts.interface import CommittedPositions, Proposal, Sampling
from components.drafts.methods.one_block import BlockBranches, OneBlockDraft, OneBlockState
from components.drafts.network.cached_block import KvCache
from components.targets.forward.cuda_graphs import RecordedWork, window_length


@final
class GraphedChain:
    """A Proposer over `inner`, of the same method and with states of the same kind."""

    def __init__(self, inner: OneBlockDraft) -> None:
        self.inner, self.method, self.needs_features = inner, inner.method, inner.needs_features
        self.max_depth, self.num_steps, self.draft_ids = inner.max_depth, inner.num_steps, inner.draft_ids
        self.kernel = inner.kernel
        self._pool: dict[int, list[tuple[KvCache, weakref.ref[OneBlockState]]]] = {}
        self._proposals: dict[tuple[int, int, int], _StaticProposal] = {}

    def new_state(self, capacity: int) -> OneBlockState:
        """State for one sequence; caches of dead states are reused, since graphs are bound to their addresses."""
        pool = self._pool.setdefault(capacity, [])
        for index, (cache, holder) in enumerate(pool):
            if holder() is None:
                state = OneBlockState(cache)
                pool[index] = (cache, weakref.ref(state))
                return state
        state = self.inner.new_state(capacity)
        pool.append((state.cache, weakref.ref(state)))
        return state

    @torch.inference_mode()
    def propose(
        self, state: OneBlockState, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        count, depth = committed.next_tokens.shape[0], min(depth, self.max_depth)
        longest = state.num_columns + 2 * depth + 1
        fits = depth > 0 and count <= depth + 1 and longest <= state.cache.shape[1]
        if not fits or state.num_columns == 0 or sampling.temperature > 0:
            return self.inner.propose(state, committed, depth, sampling, rng)
        key = (state.cache.data_ptr(), depth, window_length(longest, state.cache.shape[1]))
        if key not in self._proposals:
            self._proposals[key] = _StaticProposal(self.inner, state.cache, depth, key[2], committed)
        tokens = self._proposals[key](committed, state.num_columns)
        state.num_columns += count
        return Proposal(tokens.clone(), None)

    def begin(self, state: OneBlockState, committed: CommittedPositions, depth: int) -> BlockBranches:
        """As TreeProposer, without graphs."""
        return self.inner.begin(state, committed, depth)


class _StaticProposal:
    """Drafts `depth` tokens after at most depth + 1 new positions, over the first `window` rows of one cache."""

    def __init__(
        self, drafter: OneBlockDraft, cache: KvCache, depth: int, window: int, like: CommittedPositions
    ) -> None:
        """like: an example with the dtypes and widths of later inputs."""
        device, rows = drafter.draft_ids.device, depth + 1
        self.drafter, self.cache, self.depth, self.window = drafter, cache, depth, window
        self.rotations = drafter.prepared.block.rotations  # a graph is bound to it; a longer state replaces the block's
        self.committed = CommittedPositions(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, like.taps.shape[1], dtype=like.taps.dtype, device=device),
            torch.zeros(rows, like.last.shape[1], dtype=like.last.dtype, device=device),
        )
        self.start = torch.zeros(1, dtype=torch.int64, device=device)
        self.end = torch.ones(
            1, dtype=torch.int64, device=device
        )  # number of new positions; draft rows begin after them
        self.offsets = torch.arange(rows, device=device)
        self.captured = RecordedWork(self._run, device)

    def __call__(self, committed: CommittedPositions, start: int) -> Tensor:
        count = committed.next_tokens.shape[0]
        for buffer, values in zip(self.committed, committed, strict=True):
            buffer[:count].copy_(values, non_blocking=True)
        self.start.fill_(start)
        self.end.fill_(count)
        return self.captured()

    def _run(self) -> Tensor:
        decoder, ids = self.drafter.prepared, self.drafter.draft_ids
        qkv, residual = decoder.inputs(self.committed.next_tokens, decoder.features(self.committed))
        outputs = decoder.block.run_at(qkv, residual, self.cache, self.start + self.offsets, self.window)
        output = outputs.index_select(0, self.end - 1)
        draft_tokens = []
        for k in range(self.depth):
            tokens = ids.index_select(0, decoder.ranking(output).argmax(-1))
            draft_tokens.append(tokens)
            if k + 1 < self.depth:
                qkv, residual = decoder.inputs(tokens, decoder.next_step_input(output))
                output = decoder.block.run_at(qkv, residual, self.cache, self.start + self.end + k, self.window)
        return torch.cat(draft_tokens)
