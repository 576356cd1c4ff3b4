"""Drafters whose linear layers run once for all sequences of a batch; one sequence is a batch of one.

Shapes: B sequences, T rows of all of them, one sequence after the other, N draft vocabulary, K depths.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from components.drafts.interface import AbstractDraft, CommittedPositions, DepthBranches, Proposal, Sampling
from components.drafts.network.cached_block import CachedBlock, KvCache
from components.drafts.network.sampling import DraftSampler

Decoder = TypeVar("Decoder")


class BatchedDraft(AbstractDraft, Generic[Decoder]):
    """A BatchProposer. `losses` of a subclass sets `_decoder` to None: training makes the layout stale."""

    _decoder: Decoder | None = None

    @abstractmethod
    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """Lay the current weights out for decoding in `dtype`, and set `kernel`."""

    @abstractmethod
    def empty_state(self, decoder: Decoder, capacity: int) -> Any:
        """State for one sequence of at most `capacity` tokens."""

    @property
    def prepared(self) -> Decoder:
        """The weights laid out for decoding by `prepare_decoding` or `new_state`."""
        assert self._decoder is not None, "call prepare_decoding or new_state first"
        return self._decoder

    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for decoding in `dtype`; training afterwards makes the layout stale and drops it."""
        self._decoder = self.decoder(dtype, kernel)

    def new_state(self, capacity: int) -> Any:
        """As AbstractDraft; lays the weights out where that is still to do."""
        if self._decoder is None:
            self.prepare_decoding()
        return self.empty_state(self.prepared, capacity)

    def propose(
        self, state: Any, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """As Proposer: a batch of one."""
        return self.propose_batch([state], [committed], depth, sampling, [rng])[0]

    @abstractmethod
    def propose_batch(
        self,
        states: Sequence[Any],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer."""

    def sampler(self, sampling: Sampling, rngs: Sequence[torch.Generator]) -> DraftSampler:
        """A sampler of this drafter's tokens, one generator a sequence."""
        return DraftSampler(self.draft_ids, self.target.shape.vocab_size, sampling, rngs)


class DepthDraft(BatchedDraft[Decoder]):
    """A drafter whose draft tokens do not see each other: one pass gives the logits of all depths."""

    @abstractmethod
    def depth_logits(
        self, states: Sequence[Any], committed: Sequence[CommittedPositions], depth: int, scaled: bool
    ) -> Tensor:
        """Commit new positions; logits [depth, B, N] after the newest. Unless `scaled`, only their order is valid."""

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[Any],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer, in one pass."""
        sampler = self.sampler(sampling, rngs)
        for rows in self.depth_logits(states, committed, min(depth, self.max_depth), scaled=sampler.scaled):
            sampler.sample(rows)
            if sampler.ended:
                break
        return sampler.proposals()

    @torch.inference_mode()
    def begin(self, state: Any, committed: CommittedPositions, depth: int) -> DepthBranches:
        """As TreeProposer."""
        return DepthBranches(self.depth_logits([state], [committed], min(depth, self.max_depth), scaled=True)[:, 0])


def merged(committed: Sequence[CommittedPositions]) -> CommittedPositions:
    """The new positions of all sequences, one sequence after the other."""
    if len(committed) == 1:
        return committed[0]
    return CommittedPositions(*(torch.cat(parts) for parts in zip(*committed, strict=True)))


class CachedState(Protocol):
    """The state of a drafter with a cache for every block. num_columns: its committed positions."""

    num_columns: int

    @property
    def caches(self) -> list[KvCache]:
        """One of each block."""


def admitted(
    block: CachedBlock, state: CachedState, new: CommittedPositions, num_layers: int = 1
) -> CommittedPositions:
    """Make room for new positions in all caches of a state; those of them that are to be written.

    With a window the first ones of many are left out, since nobody will see them; num_columns moves past them.
    block: any of the drafter's; num_layers: as `CachedBlock.make_room`.
    """
    count, start = new.next_tokens.shape[0], state.num_columns
    skipped = max(block.make_room(cache, start, count, num_layers) for cache in state.caches)
    state.num_columns += skipped
    return CommittedPositions(*(part[skipped:] for part in new)) if skipped else new
