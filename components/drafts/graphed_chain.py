"""A drafter of one block whose whole proposal, intake and k guesses, is one CUDA graph.

A proposal is k + 1 rows that were committed at most and k - 1 guesses fed back: dozens of tiny operators, each of which
costs a GPU more to launch than to run. Here all k + 1 rows are always computed; those beyond what was committed write
scratch rows of the cache, which the guesses, and later the next commit, write over before any row sees them. The first
guess is made from the row of the last committed column, found by a number that lies on the device.

Greedy chains only; the prompt's intake, sampling and the end of the cache take the drafter's ordinary way. On a CPU the
same static work runs without being recorded (targets/captured.py).
"""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor

from components.drafts.branching import BlockBranches
from components.drafts.cached_block import KvCache
from components.drafts.draft import Columns, Proposal, Sampling
from components.drafts.one_block import OneBlockDraft, OneBlockState
from components.targets.captured import Captured, window_of


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
        """State for one sequence. Memory that nobody holds any more is used again: graphs are bound to addresses."""
        known = self._pool.setdefault(capacity, [])
        for index, (cache, holder) in enumerate(known):
            if holder() is None:
                state = OneBlockState(cache)
                known[index] = (cache, weakref.ref(state))
                return state
        state = self.inner.new_state(capacity)
        known.append((state.cache, weakref.ref(state)))
        return state

    @torch.inference_mode()
    def propose(
        self, state: OneBlockState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer."""
        count, depth = columns.next_tokens.shape[0], min(depth, self.max_depth)
        longest = state.num_columns + 2 * depth + 1
        fits = depth > 0 and count <= depth + 1 and longest <= state.cache.shape[1]
        if not fits or state.num_columns == 0 or sampling.temperature > 0:
            return self.inner.propose(state, columns, depth, sampling, rng)
        key = (state.cache.data_ptr(), depth, window_of(longest, state.cache.shape[1]))
        if key not in self._proposals:
            self._proposals[key] = _StaticProposal(self.inner, state.cache, depth, key[2], columns)
        tokens = self._proposals[key](columns, state.num_columns)
        state.num_columns += count
        return Proposal(tokens.clone(), None)

    def begin(self, state: OneBlockState, columns: Columns, depth: int) -> BlockBranches:
        """See TreeProposer: trees grow as they do without graphs."""
        return self.inner.begin(state, columns, depth)


class _StaticProposal:
    """`depth` guesses after at most depth + 1 new columns, over the first `window` rows of one cache."""

    def __init__(self, drafter: OneBlockDraft, cache: KvCache, depth: int, window: int, like: Columns) -> None:
        """like: columns of the dtypes and widths that will come."""
        device, rows = drafter.draft_ids.device, depth + 1
        self.drafter, self.cache, self.depth, self.window = drafter, cache, depth, window
        self.rotations = drafter.prepared.block.rotations  # a graph is bound to it; a longer state replaces the block's
        self.columns = Columns(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, like.taps.shape[1], dtype=like.taps.dtype, device=device),
            torch.zeros(rows, like.last.shape[1], dtype=like.last.dtype, device=device),
        )
        self.start = torch.zeros(1, dtype=torch.int64, device=device)
        self.end = torch.ones(1, dtype=torch.int64, device=device)  # new columns; the guesses begin after them
        self.offsets = torch.arange(rows, device=device)
        self.captured = Captured(self._run, device)

    def __call__(self, columns: Columns, start: int) -> Tensor:
        count = columns.next_tokens.shape[0]
        for ours, theirs in zip(self.columns, columns, strict=True):
            ours[:count].copy_(theirs, non_blocking=True)
        self.start.fill_(start)
        self.end.fill_(count)
        return self.captured()

    def _run(self) -> Tensor:
        decoder, ids = self.drafter.prepared, self.drafter.draft_ids
        qkv, residual = decoder.inputs(self.columns.next_tokens, decoder.features(self.columns))
        outputs = decoder.block.run_at(qkv, residual, self.cache, self.start + self.offsets, self.window)
        output = outputs.index_select(0, self.end - 1)
        guesses = []
        for k in range(self.depth):
            tokens = ids.index_select(0, decoder.ranking(output).argmax(-1))
            guesses.append(tokens)
            if k + 1 < self.depth:
                qkv, residual = decoder.inputs(tokens, decoder.fed_back(output))
                output = decoder.block.run_at(qkv, residual, self.cache, self.start + self.end + k, self.window)
        return torch.cat(guesses)
