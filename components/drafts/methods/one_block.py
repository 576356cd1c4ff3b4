"""A drafter of one block that is fed its own output: the shared base of EAGLE-1, HASS and EAGLE-3.

The methods differ in the inputs of the block, in the input of the next step and in their loss; attention of steps
(training_time_test.py), decoding a chain over a cache and draft trees are shared here.

A chain keeps its draft tokens in the cache rows after the committed positions. A tree does the same with one row per
node, and a mask marks which of these rows are a node's ancestors. Siblings share a rotary position.

A proposal can be one CUDA graph (GraphedChain): it is at most k + 1 committed rows and k - 1 draft tokens fed back,
dozens of tiny operators that cost a GPU more to launch than to run. There all k + 1 rows are always computed; those
that are not committed write scratch rows of the cache, which draft tokens, and later the next commit, overwrite before
any row sees them. The first draft token comes from the row of the last committed position, selected by an index on the
device. Greedy chains only; the prompt, sampling and the end of the cache use the drafter's ordinary path. On a CPU the
same static work runs without being captured (targets/forward/cuda_graphs.py).

Shapes: T rows of one sequence, H hidden size, N draft vocabulary.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, NamedTuple, Protocol, final

import torch
from torch import Tensor

from components.drafts.interface import Batch, Branches, CommittedPositions, EveryPosition, Proposal, Sampling
from components.drafts.methods.batched import BatchedDraft, admitted, merged
from components.drafts.methods.training_time_test import Unrolled
from components.drafts.network.cached_block import CachedBlock, KvCache
from components.drafts.network.layers import BlockParts, BlockShape, shift_left
from components.drafts.network.sampling import Ancestry, most_likely_at
from components.drafts.settings import EXTRA_DEPTH, EagleBlock
from components.targets.forward.cuda_graphs import RecordedWork, window_length
from components.targets.interface import AbstractTarget


class ChainDecoder(NamedTuple):
    """Frozen copies of the weights, laid out for decoding, as the functions that chains and trees call."""

    block: CachedBlock
    features: Callable[[CommittedPositions], Tensor]  # new positions -> the hidden input of the block, [T, H]
    inputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # tokens [T], hidden [T, H] -> qkv rows, residual [T, H]
    next_step_input: Callable[[Tensor], Tensor]  # the block's output [T, H] -> the hidden input of the next step
    logits: Callable[[Tensor], Tensor]  # the block's output -> [T, N], scaled as in training
    ranking: Callable[[Tensor], Tensor]  # logits up to a positive factor per row: enough for an argmax, and cheaper


@dataclass
class OneBlockState:
    """Columns of the cache below num_columns are committed positions; later ones are leftovers of draft tokens."""

    cache: KvCache
    num_columns: int = 0

    @property
    def caches(self) -> list[KvCache]:
        """Of every block."""
        return [self.cache]


class OneBlockDraft(BatchedDraft[ChainDecoder]):
    """See the module docstring; subclasses implement the abstract methods."""

    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: EagleBlock, draft_ids: Tensor, num_steps: int) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.shape = settings, BlockShape.of(target, settings.intermediate_size, settings.own_block)
        self.num_steps, self.max_depth = num_steps, num_steps + EXTRA_DEPTH

    @property
    @abstractmethod
    def block(self) -> BlockParts:
        """The one block's tensors."""

    @abstractmethod
    def features(self, taps: Tensor, last: Tensor) -> Tensor:
        """The input of step 0: taps [..., N * H] and last-layer outputs [..., H] of the target -> float32 [..., H]."""

    @abstractmethod
    def attention_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids [..., T] and hidden inputs [..., T, H] -> the input of q, k, v [..., in] and the residual."""

    @abstractmethod
    def next_step_input(self, output: Tensor) -> Tensor:
        """The hidden input of the next step: the block's output [..., H] -> [..., H]."""

    @abstractmethod
    def draft_logits(self, output: Tensor) -> Tensor:
        """The block's output [..., H] -> logits over the draft vocabulary [..., N]."""

    def unroll(self, batch: Batch, features: Tensor, rows: Tensor) -> Iterator[Tensor]:
        """The block's outputs [B, R, H] of steps 0, 1, ... without end, from columns rows int64 [B, R].

        Step k is fed the true x_{t+1+k}. features: [B, T, H], the hidden input of step 0.
        """
        unrolled = Unrolled(self, features, shift_left(batch.ids, 1), rows, batch.causal)
        k = 0
        while True:
            yield unrolled.step(shift_left(batch.ids, k + 1).gather(1, rows))
            k += 1

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, N] of steps 0..num_steps - 1 from columns rows [B, R], each fed the true x_{t+1+k}."""
        return map(self.draft_logits, self.outputs(batch, rows))

    def outputs(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """As `teacher_forced`, before `draft_logits`: [B, R, H]."""
        return islice(self.unroll(batch, self.features(batch.taps, batch.last), rows), self.num_steps)

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        rows = torch.arange(first, ids.numel() - 1, device=ids.device)[None]
        unrolled = Unrolled(self, self.features(taps[None, :-1], last[None, :-1]), ids[None, 1:], rows)
        tokens, steps = ids[None, 1 + first :], []
        for _ in range(depth):
            tokens, confidence = most_likely_at(self.draft_logits, unrolled.step(tokens), self.draft_ids)
            steps.append((tokens[0], confidence[0]))
        return EveryPosition.of_steps(steps)

    def empty_state(self, decoder: ChainDecoder, capacity: int) -> OneBlockState:
        return OneBlockState(decoder.block.new_cache(capacity + self.max_depth))

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[OneBlockState],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer: the last new position drafts the first token, then one row per draft token."""
        decoder, output = self.prepared, self._commit(states, committed)
        sampler, caches = self.sampler(sampling, rngs), [state.cache for state in states]
        depth = min(depth, self.max_depth)
        for k in range(depth):
            tokens = sampler.sample(decoder.logits(output) if sampler.scaled else decoder.ranking(output))
            if sampler.ended:
                break
            if k + 1 < depth:
                qkv, residual = decoder.inputs(tokens, decoder.next_step_input(output))
                starts = [state.num_columns + k for state in states]
                output = decoder.block.run_each(qkv, residual, caches, starts, [1] * len(states))
        return sampler.proposals()

    @torch.inference_mode()
    def begin(self, state: OneBlockState, committed: CommittedPositions, depth: int) -> BlockBranches:
        decoder, output = self.prepared, self._commit([state], [committed])

        def inputs(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            return decoder.inputs(tokens, decoder.next_step_input(parents))

        return BlockBranches(decoder.block, state, output, inputs, decoder.logits)

    def _commit(self, states: Sequence[OneBlockState], committed: Sequence[CommittedPositions]) -> Tensor:
        """Commit new positions; returns the block's output at the last of each sequence, [B, H]."""
        decoder = self.prepared
        committed = [admitted(decoder.block, *each) for each in zip(states, committed, strict=True)]
        new = merged(committed)
        qkv, residual = decoder.inputs(new.next_tokens.to(self.draft_ids.device), decoder.features(new))
        starts, counts = [state.num_columns for state in states], [each.next_tokens.shape[0] for each in committed]
        for state, count in zip(states, counts, strict=True):
            state.num_columns += count
        return decoder.block.run_each(qkv, residual, [state.cache for state in states], starts, counts)


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
        block.with_room(state.cache, start + count)
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


@final
class GraphedChain:
    """A Proposer over `inner`, of the same method and with states of the same kind."""

    def __init__(self, inner: OneBlockDraft) -> None:
        self.inner, self.method, self.needs_features = inner, inner.method, inner.needs_features
        self.max_depth, self.num_steps, self.draft_ids = inner.max_depth, inner.num_steps, inner.draft_ids
        self.kernel = inner.kernel
        self._pool: dict[int, list[tuple[Tensor, weakref.ref[OneBlockState]]]] = {}
        self._proposals: dict[tuple[int, int, int], _StaticProposal] = {}

    def new_state(self, capacity: int) -> OneBlockState:
        """State for one sequence; caches of dead states are reused, since graphs are bound to their addresses."""
        pool = self._pool.setdefault(capacity, [])
        for index, (rows, holder) in enumerate(pool):
            if holder() is None:
                state = OneBlockState(KvCache(rows, capacity + self.max_depth))
                pool[index] = (rows, weakref.ref(state))
                return state
        state = self.inner.new_state(capacity)
        pool.append((state.cache.rows, weakref.ref(state)))
        return state

    @torch.inference_mode()
    def propose(
        self, state: OneBlockState, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        count, depth = committed.next_tokens.shape[0], min(depth, self.max_depth)
        longest, cache = state.num_columns + 2 * depth + 1, state.cache
        fits = depth > 0 and count <= depth + 1 and longest <= cache.num_columns
        if not fits or state.num_columns == 0 or sampling != Sampling():
            return self.inner.propose(state, committed, depth, sampling, rng)
        committed = admitted(self.inner.prepared.block, state, committed)
        start = state.num_columns - cache.first
        key = (cache.rows.data_ptr(), depth, window_length(start + 2 * depth + 1, cache.rows.shape[1]))
        if key not in self._proposals:
            self._proposals[key] = _StaticProposal(self.inner, cache.rows, depth, key[2], committed)
        tokens = self._proposals[key](committed, start, cache.first)
        state.num_columns += count
        return Proposal(tokens.clone(), None)

    def begin(self, state: OneBlockState, committed: CommittedPositions, depth: int) -> BlockBranches:
        """As TreeProposer, without graphs."""
        return self.inner.begin(state, committed, depth)


class _StaticProposal:
    """Drafts `depth` tokens after at most depth + 1 new positions, over the first `window` rows of one cache."""

    def __init__(
        self, drafter: OneBlockDraft, cache: Tensor, depth: int, window: int, like: CommittedPositions
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
        self.start, self.first = torch.zeros(2, 1, dtype=torch.int64, device=device)
        self.end = torch.ones(
            1, dtype=torch.int64, device=device
        )  # number of new positions; draft rows begin after them
        self.offsets = torch.arange(rows, device=device)
        self.captured = RecordedWork(self._run, device)

    def __call__(self, committed: CommittedPositions, start: int, first: int) -> Tensor:
        """start: the cache row of the first new position; first: the column of row 0."""
        count = committed.next_tokens.shape[0]
        for buffer, values in zip(self.committed, committed, strict=True):
            buffer[:count].copy_(values, non_blocking=True)
        self.start.fill_(start)
        self.first.fill_(first)
        self.end.fill_(count)
        return self.captured()

    def _run(self) -> Tensor:
        decoder, ids = self.drafter.prepared, self.drafter.draft_ids
        qkv, residual = decoder.inputs(self.committed.next_tokens, decoder.features(self.committed))
        at = self.start + self.offsets
        outputs = decoder.block.run_at(qkv, residual, self.cache, at, self.first, self.window)
        output = outputs.index_select(0, self.end - 1)
        draft_tokens = []
        for k in range(self.depth):
            tokens = ids.index_select(0, decoder.ranking(output).argmax(-1))
            draft_tokens.append(tokens)
            if k + 1 < self.depth:
                qkv, residual = decoder.inputs(tokens, decoder.next_step_input(output))
                at = self.start + self.end + k
                output = decoder.block.run_at(qkv, residual, self.cache, at, self.first, self.window)
        return torch.cat(draft_tokens)
