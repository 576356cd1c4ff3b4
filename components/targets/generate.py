"""Continues many prompts with a target: continuous batching over one KV cache, so that no pass computes finished rows.

Up to `batch_size` rows (on a CPU at most those that CACHE_BYTES hold) go through the target together, one token a pass.
When some have finished, waiting prompts are prefilled by themselves and put into free places; when none wait, finished
rows are dropped. The course depends only on rows, batch size and kind of device: the same rows become the same bits.

Each row draws from its own generator, seeded by (seed, row id), so its samples do not depend on the other rows of its
batch. Logits of a row may still differ in the last bits with the shape of the batch; steps whose files must repeat
exactly therefore fix their rows and batch size too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.interface import AbstractCache, AbstractTarget

PREFILL_TOKENS: Final[Mapping[str, int]] = {"cuda": 8192, "cpu": 2048}
"""Most tokens of one prefill pass, padding included (a longer prompt gets its own pass): its rows have a cache of their
own until they are put into the batch's, which on a CPU would be as large as the target."""
CACHE_BYTES: Final[Mapping[str, int]] = {"cuda": 8 << 30, "cpu": 512 << 20}
"""Of the cache of all rows, where one of them does not need more: every place has room for the longest text, and a
cache of 64 such rows would be several times a small target."""
LENGTH_STEP: Final = 16  # prompts are padded to multiples of this: oneDNN compiles a bf16 kernel for every new shape
ROW_STEP: Final = 8  # and batches shrink to multiples of this, or to 4, 2, 1
FREE_SHARE: Final = 8
"""Waiting prompts are prefilled once 1 / FREE_SHARE of the places are free: few passes, and few idle rows."""


class Continuation(NamedTuple):
    """The new tokens of one row, with the end-of-text token if it came (hit_eos)."""

    ids: list[int]
    hit_eos: bool


class ContinuationRequest(NamedTuple):
    """A prompt to continue: its token ids (none empty), and at most `limit` new tokens.

    temperature: 0 is greedy. generator: needed where the temperature is not 0.
    """

    ids: Sequence[int]
    limit: int
    temperature: float = 0.0
    generator: torch.Generator | None = None


def row_generator(seed: int, row_id: str) -> torch.Generator:
    """The CPU generator of one row, seeded by (seed, row_id)."""
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
    """Generates up to `max_new_tokens` tokens for each prompt (token ids, none empty), as many at a time as fit.

    temperatures: one a row, 0 is greedy; default all greedy.
    generators: one a row, needed where a temperature is not 0.
    """
    requests = [
        ContinuationRequest(
            prompt,
            max_new_tokens,
            temperatures[row] if temperatures is not None else 0.0,
            generators[row] if generators is not None else None,
        )
        for row, prompt in enumerate(prompts)
    ]
    return continue_rows(target, requests, batch_size=len(requests), stop_at_eos=stop_at_eos)


def batches_of(
    target: AbstractTarget, prompt_lengths: Sequence[int], num_tokens: int, batch_size: int
) -> list[list[int]]:
    """Batches of at most `batch_size` prompts of like lengths, whose cache for `num_tokens` new tokens each has at most
    CACHE_BYTES. A batch is the indices of its prompts, ascending."""
    most = cache_tokens(target)
    longest_first = sorted(range(len(prompt_lengths)), key=lambda row: (-prompt_lengths[row], row))
    batches = []
    while longest_first:
        length = _padded(prompt_lengths[longest_first[0]]) + num_tokens
        count = max(1, min(batch_size, most // length))
        batches.append(sorted(longest_first[:count]))
        del longest_first[:count]
    return batches


def cache_tokens(target: AbstractTarget) -> int:
    """How many tokens a cache of CACHE_BYTES holds, over all its rows."""
    return CACHE_BYTES[target.device.type] // target.new_cache(1, 1).bytes_per_token()


def continue_rows(
    target: AbstractTarget,
    requests: Sequence[ContinuationRequest],
    *,
    batch_size: int,
    stop_at_eos: bool = True,
    on_pass: Callable[[float], None] | None = None,
) -> list[Continuation]:
    """Continues every row; results in the order of `requests`. At most `batch_size` rows are in the cache at a time.

    Waiting rows are taken in their order: sort them by length to pad little.
    on_pass: called after every pass, prefills too, with the share of the work that is done, 0 .. 1.
    """
    assert requests and all(len(request.ids) > 0 and request.limit > 0 for request in requests)
    highest = max(max(request.ids) for request in requests)
    check_vocabulary(highest, target.shape.vocab_size, str(target.folder or "the target"))
    assert all(one.generator is not None for one in requests if one.temperature > 0.0), "sampling needs generators"
    ends = set(target.shape.eos_token_ids) if stop_at_eos else set()
    batch = _Batch(target, requests, min(batch_size, len(requests)), ends)
    report = on_pass or (lambda share: None)
    while batch.places_used or batch.waiting < len(requests):
        while batch.fill():
            report(batch.share_done())
        if batch.places_used:
            batch.step()
        batch.shrink()
        report(batch.share_done())
    return [Continuation(ids, hit_eos) for ids, hit_eos in zip(batch.new, batch.hit_eos, strict=True)]


def check_vocabulary(highest: int, vocab_size: int, location: str) -> None:
    """Raises UserError, naming `location`, for a token that the target has no embedding of."""
    if highest >= vocab_size:
        raise UserError(
            f"{location}: its tokenizer gives token {highest}, and config.json knows {vocab_size} tokens: the"
            " tokenizer is another model's"
        )


@dataclass
class _Batch:
    """The rows in the cache. places[b]: the index in `requests` of the row in sequence b; None is a free place."""

    target: AbstractTarget
    requests: Sequence[ContinuationRequest]
    size: int
    ends: set[int]
    cache: AbstractCache = field(init=False)
    places: list[int | None] = field(init=False)
    waiting: int = 0  # the next row that is not in the cache yet
    new: list[list[int]] = field(init=False)
    hit_eos: list[bool] = field(init=False)
    finished: int = 0

    def __post_init__(self) -> None:
        longest = max(_padded(len(request.ids)) + request.limit for request in self.requests)
        if self.target.device.type == "cpu":  # on a GPU many rows are what is quick, and `plan` says how many fit
            self.size = max(1, min(self.size, cache_tokens(self.target) // longest))
        self.cache = self.target.new_cache(self.size, longest)
        self.places = [None] * self.size
        self.new = [[] for _ in self.requests]
        self.hit_eos = [False] * len(self.requests)

    @property
    def places_used(self) -> int:
        """Rows that are being continued."""
        return sum(row is not None for row in self.places)

    def share_done(self) -> float:
        """Share of the work that is done: a finished row counts whole, a running one by its tokens over its limit."""
        running = sum(len(self.new[row]) / self.requests[row].limit for row in self.places if row is not None)
        return (self.finished + running) / len(self.requests)

    def fill(self) -> bool:
        """Prefill waiting prompts into free places, in one pass, if enough of these are free; returns whether."""
        waiting = len(self.requests) - self.waiting
        free = [place for place, row in enumerate(self.places) if row is None]
        is_due = waiting > 0 and len(free) >= max(1, min(self.size // FREE_SHARE, waiting))
        if is_due:
            self._prefill(free)
        return is_due

    def _prefill(self, free: Sequence[int]) -> None:
        """As many waiting prompts as the free places and one pass hold."""
        rows: list[int] = []
        longest = 0
        for row in range(self.waiting, min(self.waiting + len(free), len(self.requests))):
            length = max(longest, _padded(len(self.requests[row].ids)))
            if rows and length * (len(rows) + 1) > PREFILL_TOKENS[self.target.device.type]:
                break
            rows.append(row)
            longest = length
        self.waiting += len(rows)
        padded = torch.zeros(len(rows), longest, dtype=torch.int64)
        lengths = torch.tensor([len(self.requests[row].ids) for row in rows])
        for place, row in enumerate(rows):
            padded[place, : int(lengths[place])] = torch.as_tensor(self.requests[row].ids)
        # The first rows of a batch that go through in one pass need no cache of their own.
        fills = rows == list(range(self.size))
        prompt_cache = self.cache if fills else self.target.new_cache(len(rows), longest)
        passed = self.target.forward(padded, prompt_cache, num_valid=lengths, logits="last")
        if not fills:
            self.cache.put(free[: len(rows)], prompt_cache)
        assert passed.logits is not None
        for place, row in zip(free, rows, strict=False):
            self.places[place] = row
        self._append_tokens(free[: len(rows)], passed.logits[:, 0])

    def step(self) -> None:
        """Append one token to every row. Free places get padding, so that the batch keeps its shape."""
        tokens = torch.tensor([[0 if row is None else self.new[row][-1]] for row in self.places])
        alive = torch.tensor([int(row is not None) for row in self.places])
        passed = self.target.forward(tokens, self.cache, num_valid=alive, logits="last")
        assert passed.logits is not None
        self._append_tokens(range(len(self.places)), passed.logits[:, 0])

    def _append_tokens(self, places: Sequence[int], logits: Tensor) -> None:
        """Append the next token at each of these places, from logits [len(places), V]; finished rows free theirs."""
        best = logits.argmax(dim=-1).tolist()
        before = self.finished
        for place, token, number in zip(places, best, range(len(best)), strict=True):
            row = self.places[place]
            if row is not None and self._append_token(row, token, logits[number]):
                self.places[place] = None
                self.finished += 1
        if self.finished > before:  # free places need not be attended to
            used = torch.tensor([int(row is not None) for row in self.places])
            self.cache.truncate(self.cache.lengths * used)

    def _append_token(self, row: int, best: int, scores: Tensor) -> bool:
        """Append a row's next token, given logits `scores` [V] and their argmax; returns whether it was the last."""
        request, token = self.requests[row], best
        if request.temperature > 0.0:
            probabilities = torch.softmax(scores.float().cpu() / request.temperature, dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=request.generator)[0])
        self.new[row].append(token)
        self.hit_eos[row] = token in self.ends
        return self.hit_eos[row] or len(self.new[row]) == request.limit

    def shrink(self) -> None:
        """Drop free places when no prompt waits."""
        if self.waiting < len(self.requests):
            return
        new_size = _batch_size_for(self.places_used)
        if 0 < new_size < len(self.places):
            used = [place for place, row in enumerate(self.places) if row is not None]
            free = [place for place, row in enumerate(self.places) if row is None]
            places_kept = sorted([*used, *free[: new_size - len(used)]])
            self.cache.select(places_kept)
            self.places = [self.places[place] for place in places_kept]


def _padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def _batch_size_for(rows: int) -> int:
    """The size of a batch for this many rows; few different sizes, since every new shape compiles kernels."""
    return next((size for size in (0, 1, 2, 4) if rows <= size), -(-rows // ROW_STEP) * ROW_STEP)
