"""Training batches, in an order that follows from the seed alone or that the data declares.

Rows are shuffled by (seed, epoch) and cut into batches of at most `batch_tokens` tokens, padding included:
  none    rows in shuffled order, each padded to the longest of its batch;
  bucket  rows sorted by length inside pools of a few batches to save padding, then the pool's batches shuffled;
  pack    several conversations per row (packing.py), pool by pool.
In a declared order (a curriculum, data.mix_chats) every epoch is the same and a batch holds neighbours of that order:
nothing is pooled, so `bucket` equals `none`, and lanes are packed in order.
Step s always gets the same batch, so a resumed run needs no saved generator state, only the step number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from components.data.features import Example, FeatureRow, FeatureSource
from components.drafts.draft import Batch
from components.drafts.packing import first_fit_decreasing, in_order, lane_width, packed

Packing = Literal["none", "bucket", "pack"]
BATCHES_IN_POOL = 8
LENGTH_STEP = 32  # padded lengths are multiples of this: oneDNN compiles and keeps a bf16 kernel for every new shape


@dataclass(frozen=True)
class BatchOrder:
    """Assigns rows to batches. Sizes are in tokens. shuffled: False keeps the order of `rows`."""

    rows: tuple[FeatureRow, ...]
    batch_tokens: int
    max_tokens: int
    seed: int
    packing: Packing = "bucket"
    shuffled: bool = True

    @cached_property
    def lane_width(self) -> int:
        """Width of a packed batch in tokens: the same for all batches of all epochs."""
        return lane_width(max(map(self.length, self.rows)), self.batch_tokens, LENGTH_STEP)

    def length(self, row: FeatureRow) -> int:
        """Number of tokens of a row that are used."""
        return min(row.num_tokens, self.max_tokens)

    def epoch(self, number: int) -> list[list[FeatureRow]]:
        """The batches of one pass over the rows."""
        if not self.shuffled:
            return self._pack_in_order() if self.packing == "pack" else self._split(self.rows)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = [self.rows[i] for i in torch.randperm(len(self.rows), generator=generator).tolist()]
        if self.packing == "none":
            return self._split(order)
        mean = sum(map(self.length, order)) / len(order)
        pool_size = max(1, int(BATCHES_IN_POOL * self.batch_tokens / mean))
        batches: list[list[FeatureRow]] = []
        for start in range(0, len(order), pool_size):
            pool_rows = order[start : start + pool_size]
            if self.packing == "pack":
                batches += self._pack_shuffled(pool_rows, generator)
                continue
            pool_batches = self._split(sorted(pool_rows, key=self.length))
            batches += [pool_batches[i] for i in torch.randperm(len(pool_batches), generator=generator).tolist()]
        return batches

    def batch(self, features: FeatureSource, rows: list[FeatureRow], device: torch.device) -> Batch:
        """Load the rows of a batch with their features, converted to float32."""
        examples = features.load_all(rows, self.max_tokens)
        if self.packing == "pack":
            return packed(examples, self.max_tokens, self.lane_width, device)
        return padded(examples, self.max_tokens, device)

    def from_step(self, step: int) -> Iterator[list[FeatureRow]]:
        """Yield the batches of steps `step`, `step` + 1, ... without end; step 0 is the first."""
        number = 0
        while True:
            batches = self.epoch(number)
            yield from batches[step:]
            step, number = max(0, step - len(batches)), number + 1

    def _split(self, rows: Sequence[FeatureRow]) -> list[list[FeatureRow]]:
        batches: list[list[FeatureRow]] = [[]]
        width = 0
        for row in rows:
            width = max(width, padded_length(self.length(row)))
            if batches[-1] and (len(batches[-1]) + 1) * width > self.batch_tokens:
                batches.append([])
                width = padded_length(self.length(row))
            batches[-1].append(row)
        return batches

    def _pack_shuffled(self, rows: list[FeatureRow], generator: torch.Generator) -> list[list[FeatureRow]]:
        """Pack rows into lanes (first fit decreasing), shuffle the lanes and cut them into batches."""
        lanes = first_fit_decreasing([self.length(row) for row in rows], self.lane_width)
        lanes = [lanes[i] for i in torch.randperm(len(lanes), generator=generator).tolist()]
        lanes_in_batch = self._lanes_in_batch
        return [
            [rows[index] for lane in lanes[start : start + lanes_in_batch] for index in lane]
            for start in range(0, len(lanes), lanes_in_batch)
        ]

    def _pack_in_order(self) -> list[list[FeatureRow]]:
        """Fill lanes with the rows in order and cut them into batches."""
        batches: dict[int, list[FeatureRow]] = {}
        lanes = in_order([self.length(row) for row in self.rows], self.lane_width)
        for row, (lane, _) in zip(self.rows, lanes, strict=True):
            batches.setdefault(lane // self._lanes_in_batch, []).append(row)
        return list(batches.values())

    @property
    def _lanes_in_batch(self) -> int:
        return max(1, self.batch_tokens // self.lane_width)


def padded_length(num_tokens: int) -> int:
    """The next multiple of LENGTH_STEP."""
    return -(-num_tokens // LENGTH_STEP) * LENGTH_STEP


def step_generator(batch: Batch, seed: int) -> torch.Generator:
    """The generator of a method's training noise: the same optimiser step and seed give the same numbers.

    It is seeded by the step, not the batch: a batch that recurs every epoch must not meet the same noise each time. It
    lives on the CPU, where a seed means the same on every machine, and a resumed run need not restore it.
    """
    return torch.Generator().manual_seed(seed * 1_000_003 + batch.step)


def padded(examples: list[Example], max_tokens: int, device: torch.device) -> Batch:
    """One example per row, padded to a multiple of LENGTH_STEP; padding has id 0 and mask False."""
    lengths = [min(len(example.ids), max_tokens) for example in examples]
    width = padded_length(max(lengths))

    def stacked(name: str) -> Tensor:
        first = getattr(examples[0], name)
        rows = first.new_zeros((len(examples), width, *first.shape[1:]))
        for row, example, length in zip(rows, examples, lengths, strict=True):
            row[:length] = getattr(example, name)[:length]
        return rows.to(device)

    return Batch(
        ids=stacked("ids").long(),
        mask=stacked("mask").bool(),
        taps=stacked("taps").float(),
        last=stacked("last").float(),
        lengths=torch.tensor(lengths, device=device),
    )
