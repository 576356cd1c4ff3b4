"""A drafter of one block that is fed its own output: what EAGLE-1, HASS and EAGLE-3 share, trained and decoded.

The methods differ in what the block reads, in what is handed to the next step and in their loss; how steps attend
(unrolled.py), how a chain runs over a cache and how guesses branch (branching.py) is one thing, here.

Shapes: T rows of one sequence, H hidden size, N draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from components.drafts.branching import BlockBranches
from components.drafts.cached_block import CachedBlock, KvCache
from components.drafts.draft import AbstractDraft, Batch, Columns, Proposal, Sampling
from components.drafts.layers import BlockShape
from components.drafts.losses import Normaliser
from components.drafts.masks import shift_left
from components.drafts.sampling import Guesses
from components.drafts.settings import LossName
from components.drafts.unrolled import BlockParts, Unrolled

EXTRA_DEPTH = 4  # how much deeper than trained a chain may go


class ChainDecoder(NamedTuple):
    """Frozen copies of the weights, laid out for decoding, as the functions that a chain and a tree are made of."""

    block: CachedBlock
    features: Callable[[Columns], Tensor]  # new columns -> what the block is given with their tokens, [T, H]
    inputs: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # tokens [T], hidden [T, H] -> qkv rows, residual [T, H]
    fed_back: Callable[[Tensor], Tensor]  # the block's output -> what the next step is given, [T, H] -> [T, H]
    logits: Callable[[Tensor], Tensor]  # the block's output -> [T, N], scaled as in training
    ranking: Callable[[Tensor], Tensor]  # the same up to a positive factor a row: enough for an argmax, and cheaper


@dataclass
class OneBlockState:
    """Cache rows below num_columns are committed columns; later rows hold the last guesses and mean nothing."""

    cache: KvCache
    num_columns: int = 0


class OneBlockDraft(AbstractDraft):
    """See the module docstring. Subclasses say what the abstract methods ask."""

    packs: ClassVar[bool] = True

    def __init__(self, target: Any, shape: BlockShape, draft_ids: Tensor, num_steps: int) -> None:
        super().__init__()
        self.shape, self.num_steps, self.max_depth = shape, num_steps, num_steps + EXTRA_DEPTH
        self.step_decay = 0.8
        self.normaliser: Normaliser = "token"
        self.loss_name: LossName = "soft_ce"
        self._target = (target,)  # in a tuple, so that nothing of the target becomes a parameter of the drafter
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._decoder: ChainDecoder | None = None

    def take_training_settings(self, settings: Mapping[str, Any]) -> None:
        """step_decay, normaliser and loss, where given."""
        self.step_decay = float(settings.get("step_decay", self.step_decay))
        self.normaliser = settings.get("normaliser", self.normaliser)
        self.loss_name = settings.get("loss", self.loss_name)

    @property
    def target(self) -> Any:
        """The AbstractTarget this drafter serves."""
        return self._target[0]

    @property
    def prepared(self) -> ChainDecoder:
        """The weights as they are decoded with; `prepare_decoding` or `new_state` makes them."""
        assert self._decoder is not None, "call prepare_decoding or new_state first"
        return self._decoder

    @property
    @abstractmethod
    def block(self) -> BlockParts:
        """The one block's tensors."""

    @abstractmethod
    def features(self, taps: Tensor, last: Tensor) -> Tensor:
        """What step 0 is given: the target's taps [..., 3H] and last-layer outputs [..., H] -> float32 [..., H]."""

    @abstractmethod
    def block_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids [..., T] and what goes with them [..., T, H] -> what q, k, v read [..., in] and the residual."""

    @abstractmethod
    def fed_back(self, output: Tensor) -> Tensor:
        """What the next step is given: the block's output [..., H] -> [..., H]."""

    @abstractmethod
    def guess_logits(self, output: Tensor) -> Tensor:
        """The block's output [..., H] -> logits over the draft vocabulary [..., N]."""

    @abstractmethod
    def decoder(self, dtype: torch.dtype, kernel: str) -> ChainDecoder:
        """The weights as they are now, laid out for decoding in `dtype`."""

    def unroll(self, batch: Batch, features: Tensor, rows: Tensor) -> Iterator[Tensor]:
        """The block's outputs [B, R, H] of steps 0, 1, ... without end, from columns rows int64 [B, R].

        Step k is fed the true x_{t+1+k}. features: [B, T, H], what step 0 is given.
        """
        unrolled = Unrolled(self, features, shift_left(batch.ids, 1), rows, batch.causal)
        k = 0
        while True:
            yield unrolled.step(shift_left(batch.ids, k + 1).gather(1, rows))
            k += 1

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, N] of steps 0..num_steps - 1 from columns rows [B, R], each fed the true x_{t+1+k}."""
        outputs = self.unroll(batch, self.features(batch.taps, batch.last), rows)
        for _ in range(self.num_steps):
            yield self.guess_logits(next(outputs))

    @torch.no_grad()
    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """Greedy proposals from every column at once, each fed its own guesses: [T] ids -> int64 [T-1, depth]."""
        rows = torch.arange(ids.numel() - 1, device=ids.device)[None]
        unrolled = Unrolled(self, self.features(taps[None, :-1], last[None, :-1]), ids[None, 1:], rows)
        tokens, guesses = ids[None, 1:], []
        for _ in range(depth):
            tokens = self.draft_ids[self.guess_logits(unrolled.step(tokens)).argmax(-1)]
            guesses.append(tokens[0])
        return torch.stack(guesses, 1)

    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Lay the weights out for decoding in `dtype`; training afterwards makes the layout stale and drops it."""
        self._decoder = self.decoder(dtype, kernel)

    def new_state(self, capacity: int) -> OneBlockState:
        """State for one sequence of at most `capacity` tokens."""
        if self._decoder is None:
            self.prepare_decoding()
        assert self._decoder is not None
        return OneBlockState(self._decoder.block.new_cache(capacity + self.max_depth))

    @torch.inference_mode()
    def propose(
        self, state: OneBlockState, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer. The last new column makes the first guess, then one row a guess."""
        decoder, output = self._committed(state, columns)
        guesses = Guesses(self.draft_ids, self.target.shape.vocab_size, sampling, rng)
        logits = decoder.ranking if guesses.greedy else decoder.logits
        depth = min(depth, self.max_depth)
        for k in range(depth):
            tokens = guesses.pick(logits(output))
            if k + 1 < depth:
                qkv, residual = decoder.inputs(tokens, decoder.fed_back(output))
                output = decoder.block.run(qkv, residual, state.cache, state.num_columns + k, last_only=True)
        return guesses.proposal()

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[OneBlockState],
        columns: Sequence[Columns],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """See BatchProposer: as `propose`, with the linear layers run once for all sequences."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        block, caches = decoder.block, [state.cache for state in states]
        starts, counts = [state.num_columns for state in states], [taken.next_tokens.shape[0] for taken in columns]
        taken = Columns(*(torch.cat(parts) for parts in zip(*columns, strict=True)))
        qkv, residual = decoder.inputs(taken.next_tokens.to(self.draft_ids.device), decoder.features(taken))
        output = block.run_each(qkv, residual, caches, starts, counts)
        for state, count in zip(states, counts, strict=True):
            state.num_columns += count
        guesses = [Guesses(self.draft_ids, self.target.shape.vocab_size, sampling, rng) for rng in rngs]
        logits = decoder.ranking if guesses[0].greedy else decoder.logits
        depth = min(depth, self.max_depth)
        for k in range(depth):
            rows = logits(output).split(1)
            tokens = torch.cat([own.pick(row) for own, row in zip(guesses, rows, strict=True)])
            if k + 1 < depth:
                qkv, residual = decoder.inputs(tokens, decoder.fed_back(output))
                starts = [state.num_columns + k for state in states]
                output = block.run_each(qkv, residual, caches, starts, [1] * len(states))
        return [own.proposal() for own in guesses]

    @torch.inference_mode()
    def begin(self, state: OneBlockState, columns: Columns, depth: int) -> BlockBranches:
        """See TreeProposer."""
        decoder, output = self._committed(state, columns)

        def inputs(tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
            return decoder.inputs(tokens, decoder.fed_back(parents))

        return BlockBranches(decoder.block, state, output, inputs, decoder.logits)

    def _committed(self, state: OneBlockState, columns: Columns) -> tuple[ChainDecoder, Tensor]:
        """Take in new columns; returns the block's output [1, H] at the last of them."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        tokens, start = columns.next_tokens.to(self.draft_ids.device), state.num_columns
        qkv, residual = decoder.inputs(tokens, decoder.features(columns))
        state.num_columns += tokens.shape[0]
        return decoder, decoder.block.run(qkv, residual, state.cache, start, last_only=True)
