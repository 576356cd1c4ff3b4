"""Continue many prompts with a target: continuous batching over one KV cache, so that no pass is spent on ended rows.

Up to `batch_size` rows go through the target together, one token a pass. When some have ended, waiting prompts are
prefilled by themselves and put into the free places; when none wait, ended rows are dropped and the passes get smaller.
What happens follows from the rows and the batch size alone, so the same rows always become the same bits.

Each row draws from its own generator, seeded by (seed, row id), so what a row samples does not depend on which rows
share its batch. Logits of a row may still differ in the last bits with the shape of the batch; steps whose files must
repeat exactly therefore fix their rows and batch size too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.model import AbstractCache, AbstractTarget

PREFILL_TOKENS: Final = 8192
"""Tokens of one prefilling pass at most, padding included (a longer prompt is a pass of its own); bounds memory."""
LENGTH_STEP: Final = 16  # prompts are padded to multiples of this: oneDNN compiles a bf16 kernel for every new shape
ROW_STEP: Final = 8  # and batches shrink to multiples of this, or to 4, 2, 1
FREE_SHARE: Final = 8
"""1 / this of the places must be free before waiting prompts are prefilled: few passes, and few idle rows."""


class Continuation(NamedTuple):
    """What one row became."""

    ids: list[int]  # the new tokens; the end-of-text token is included where it came
    ended: bool  # by an end-of-text token


class Ask(NamedTuple):
    """A prompt to continue: its token ids (none empty), and at most `limit` new tokens.

    temperature: 0 is greedy. generator: needed where the temperature is not 0.
    """

    ids: Sequence[int]
    limit: int
    temperature: float = 0.0
    generator: torch.Generator | None = None


def row_generator(seed: int, row_id: str) -> torch.Generator:
    """A CPU generator of this row's own."""
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def continue_batch(
    target: AbstractTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    stop_at_eos: bool = True,
) -> list[Continuation]:
    """Up to `max_new_tokens` new tokens for each prompt (token ids, none empty), all of them in one batch.

    temperatures: one a row, 0 is greedy; default all greedy.
    generators: one a row, needed where a temperature is not 0.
    """
    asks = [
        Ask(
            prompt,
            max_new_tokens,
            temperatures[row] if temperatures is not None else 0.0,
            generators[row] if generators is not None else None,
        )
        for row, prompt in enumerate(prompts)
    ]
    return continue_rows(target, asks, batch_size=len(asks), stop_at_eos=stop_at_eos)


def continue_rows(
    target: AbstractTarget,
    asks: Sequence[Ask],
    *,
    batch_size: int,
    stop_at_eos: bool = True,
    on_pass: Callable[[float], None] | None = None,
) -> list[Continuation]:
    """What every row becomes, in the order of `asks`; at most `batch_size` rows are in the cache at a time.

    Waiting rows come in their order: sort them by length, and little is padded.
    on_pass: called after every pass with the share of the work that is done, a row being done at its end or limit.
    """
    assert asks and all(len(ask.ids) > 0 and ask.limit > 0 for ask in asks)
    _check_known(target, asks)
    assert all(ask.generator is not None for ask in asks if ask.temperature > 0.0), "sampling needs generators"
    batch = _Batch(target, asks, min(batch_size, len(asks)), set(target.shape.eos_token_ids) if stop_at_eos else set())
    while batch.places_used or batch.waiting < len(asks):
        batch.fill()
        if batch.places_used:
            batch.step()
        batch.shrink()
        if on_pass is not None:
            on_pass(batch.share_done())
    return [Continuation(ids, ended) for ids, ended in zip(batch.new, batch.ended, strict=True)]


def _check_known(target: AbstractTarget, asks: Sequence[Ask]) -> None:
    """A UserError where a prompt holds a token that the target has no embedding of."""
    highest = max(max(ask.ids) for ask in asks)
    if highest >= target.shape.vocab_size:
        raise UserError(
            f"{target.folder or 'the target'}: its tokenizer gives token {highest}, and config.json knows"
            f" {target.shape.vocab_size} tokens: the tokenizer is another model's"
        )


@dataclass
class _Batch:
    """The rows in the cache. places[b] is the row of `asks` in sequence b of the cache; None is a free place."""

    target: AbstractTarget
    asks: Sequence[Ask]
    size: int
    ends: set[int]
    cache: AbstractCache = field(init=False)
    places: list[int | None] = field(init=False)
    waiting: int = 0  # the next row that has not begun
    new: list[list[int]] = field(init=False)
    ended: list[bool] = field(init=False)
    finished: int = 0

    def __post_init__(self) -> None:
        longest = max(_padded(len(ask.ids)) + ask.limit for ask in self.asks)
        self.cache = self.target.new_cache(self.size, longest)
        self.places = [None] * self.size
        self.new = [[] for _ in self.asks]
        self.ended = [False] * len(self.asks)

    @property
    def places_used(self) -> int:
        """Rows that are being continued."""
        return sum(row is not None for row in self.places)

    def share_done(self) -> float:
        """Tokens that were made, those that finished rows did not need counted as made, over all that may come."""
        running = sum(len(self.new[row]) / self.asks[row].limit for row in self.places if row is not None)
        return (self.finished + running) / len(self.asks)

    def fill(self) -> None:
        """Prefill waiting prompts and put them into the free places, once enough of these are free."""
        while self.waiting < len(self.asks):
            free = [place for place, row in enumerate(self.places) if row is None]
            enough = max(1, min(self.size // FREE_SHARE, len(self.asks) - self.waiting))
            if len(free) < (enough if self.cache.takes_others else self.size):
                return
            self._prefill(free)

    def _prefill(self, free: Sequence[int]) -> None:
        """As many waiting prompts as the free places and one pass hold."""
        rows: list[int] = []
        longest = 0
        for row in range(self.waiting, min(self.waiting + len(free), len(self.asks))):
            length = max(longest, _padded(len(self.asks[row].ids)))
            if rows and length * (len(rows) + 1) > PREFILL_TOKENS and self.cache.takes_others:
                break
            rows.append(row)
            longest = length
        self.waiting += len(rows)
        padded = torch.zeros(len(rows), longest, dtype=torch.int64)
        lengths = torch.tensor([len(self.asks[row].ids) for row in rows])
        for place, row in enumerate(rows):
            padded[place, : int(lengths[place])] = torch.as_tensor(self.asks[row].ids)
        if self.cache.takes_others:
            own = self.target.new_cache(len(rows), longest)
            passed = self.target.forward(padded, own, num_valid=lengths, logits="last")
            self.cache.put(free[: len(rows)], own)
        else:  # a batch of its own from the beginning to the end
            capacity = longest + max(self.asks[row].limit for row in rows)
            self.size, self.places = len(rows), [None] * len(rows)
            self.cache = self.target.new_cache(len(rows), capacity)
            passed = self.target.forward(padded, self.cache, num_valid=lengths, logits="last")
        assert passed.logits is not None
        for place, row in zip(free, rows, strict=False):
            self.places[place] = row
        self._take(free[: len(rows)], passed.logits[:, 0])

    def step(self) -> None:
        """One more token for every row. Free places get padding that is not counted: the batch keeps its shape."""
        tokens = torch.tensor([[0 if row is None else self.new[row][-1]] for row in self.places])
        alive = torch.tensor([int(row is not None) for row in self.places])
        passed = self.target.forward(tokens, self.cache, num_valid=alive, logits="last")
        assert passed.logits is not None
        self._take(range(len(self.places)), passed.logits[:, 0])

    def _take(self, places: Sequence[int], logits: Tensor) -> None:
        """Pick the next token at each of these places, from logits [len(places), V]; rows that end leave theirs."""
        best = logits.argmax(dim=-1).tolist()
        before = self.finished
        for place, token, number in zip(places, best, range(len(best)), strict=True):
            row = self.places[place]
            if row is not None and self._grow(row, token, logits[number]):
                self.places[place] = None
                self.finished += 1
        if self.finished > before:  # what ended rows have seen need not be looked at any more
            used = torch.tensor([int(row is not None) for row in self.places])
            self.cache.truncate(self.cache.lengths * used)

    def _grow(self, row: int, best: int, scores: Tensor) -> bool:
        """Give a row its next token, of logits `scores` [V] with the largest at `best`; whether that was its last."""
        ask, token = self.asks[row], best
        if ask.temperature > 0.0:
            probabilities = torch.softmax(scores.float().cpu() / ask.temperature, dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=ask.generator)[0])
        self.new[row].append(token)
        self.ended[row] = token in self.ends
        return self.ended[row] or len(self.new[row]) == ask.limit

    def shrink(self) -> None:
        """Drop free places that nobody waits for."""
        if self.waiting < len(self.asks):
            return
        wanted = _fewer(self.places_used)
        if 0 < wanted < len(self.places):
            used = [place for place, row in enumerate(self.places) if row is not None]
            free = [place for place, row in enumerate(self.places) if row is None]
            kept = sorted([*used, *free[: wanted - len(used)]])
            self.cache.select(kept)
            self.places = [self.places[place] for place in kept]


def _padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _fewer(rows: int) -> int:
    """The size of a batch for this many rows: few different ones."""
    return next((size for size in (0, 1, 2, 4) if rows <= size), -(-rows // ROW_STEP) * ROW_STEP)
