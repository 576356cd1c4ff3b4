"""Training batches, in an order that follows from the seed alone or that the data declares.

Rows are shuffled by (seed, epoch) and cut into batches of at most `batch_tokens` tokens, padding included:
  none    rows in shuffled order, each padded to the longest of its batch;
  bucket  rows sorted by length inside pools of a few batches to save padding, then the pool's batches shuffled;
  pack    several conversations per row, pool by pool.
In a declared order (a curriculum, data.mix_chats) every epoch is the same and a batch holds neighbours of that order:
nothing is pooled, so `bucket` equals `none`, and lanes are packed in order.
Step s always gets the same batch, so a resumed run needs no saved generator state, only the step number.

Packing: rows of a batch are lanes of one width. An epoch fills lanes with conversations, the longest first, each into
the first lane that has room (first-fit decreasing: at most 11/9 of the fewest lanes; Dosa 2007), then takes the lanes
in random order. All batches of a run have the same shape [lanes, width] but the last of a pool, which is shorter:
kernels that are compiled or captured for a shape are so once. Packed conversations do not see each other (layers.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from components.data.features.format import Example, FeatureRow, FeatureSource
from components.drafts.interface import Batch
from components.drafts.network.layers import Documents
from components.drafts.training.ranks import shared_out

Packing = Literal["none", "bucket", "pack"]
BATCHES_IN_POOL = 8
LENGTH_STEP = 32  # padded lengths are multiples of this: oneDNN compiles and keeps a bf16 kernel for every new shape


@dataclass(frozen=True)
class DataChoice:
    """Which features are used and how they are batched: settings of `train_draft`."""

    draft_vocab_size: int  # 0: by default_size
    batch_tokens: int
    max_tokens: int
    eval_rows: int
    packing: Packing
    order: Literal["given", "shuffled"]


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
            return self.parts(list(self.rows), self.batch_tokens)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = [self.rows[i] for i in torch.randperm(len(self.rows), generator=generator).tolist()]
        if self.packing == "none":
            return self._split(order, self.batch_tokens)
        mean = sum(map(self.length, order)) / len(order)
        pool_size = max(1, int(BATCHES_IN_POOL * self.batch_tokens / mean))
        batches: list[list[FeatureRow]] = []
        for start in range(0, len(order), pool_size):
            pool_rows = order[start : start + pool_size]
            if self.packing == "pack":
                batches += self._pack_shuffled(pool_rows, generator)
                continue
            pool_batches = self._split(sorted(pool_rows, key=self.length), self.batch_tokens)
            batches += [pool_batches[i] for i in torch.randperm(len(pool_batches), generator=generator).tolist()]
        return batches

    def batch(self, features: FeatureSource, rows: list[FeatureRow]) -> Batch:
        """Load the rows of a batch with their features, where and as these are stored."""
        examples = features.load_all(rows, self.max_tokens)
        if self.packing == "pack":
            return packed(examples, self.max_tokens, self.lane_width)
        return padded(examples, self.max_tokens)

    def from_step(self, step: int) -> Iterator[list[FeatureRow]]:
        """Yield the batches of steps `step`, `step` + 1, ... without end; step 0 is the first."""
        number = 0
        while True:
            batches = self.epoch(number)
            yield from batches[step:]
            step, number = max(0, step - len(batches)), number + 1

    def shares(self, rows: list[FeatureRow], number: int) -> list[list[FeatureRow]]:
        """Cut a batch into shares of about as many tokens each, for so many processes; some may be empty."""
        if number == 1:
            return [rows]
        shares: list[list[FeatureRow]] = [[] for _ in range(number)]
        if self.packing == "pack":  # neighbours together, so that the lanes are those of the whole batch
            lanes = self._lanes_together(rows, 1)
            for index, lane in enumerate(lanes):
                shares[index * number // len(lanes)] += lane
            return shares
        for row, rank in zip(rows, shared_out([padded_length(self.length(row)) for row in rows], number), strict=True):
            shares[rank].append(row)
        return shares

    def parts(self, rows: list[FeatureRow], tokens: int) -> list[list[FeatureRow]]:
        """Cut a batch into parts of at most `tokens` tokens, padding included, or of one row or lane; 0: whole."""
        if not tokens or not rows:
            return [rows] if rows else []
        if self.packing == "pack":
            return self._lanes_together(rows, max(1, tokens // self.lane_width))
        return self._split(rows, tokens)

    def _split(self, rows: Sequence[FeatureRow], batch_tokens: int) -> list[list[FeatureRow]]:
        batches: list[list[FeatureRow]] = [[]]
        width = 0
        for row in rows:
            width = max(width, padded_length(self.length(row)))
            if batches[-1] and (len(batches[-1]) + 1) * width > batch_tokens:
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

    def _lanes_together(self, rows: Sequence[FeatureRow], num_lanes: int) -> list[list[FeatureRow]]:
        """Fill lanes with the rows in order and cut them into batches of num_lanes."""
        batches: dict[int, list[FeatureRow]] = {}
        lanes = in_order([self.length(row) for row in rows], self.lane_width)
        for row, (lane, _) in zip(rows, lanes, strict=True):
            batches.setdefault(lane // num_lanes, []).append(row)
        return list(batches.values())

    @property
    def _lanes_in_batch(self) -> int:
        return max(1, self.batch_tokens // self.lane_width)


def padded_length(num_tokens: int) -> int:
    """The next multiple of LENGTH_STEP."""
    return -(-num_tokens // LENGTH_STEP) * LENGTH_STEP


def drawn_by_row(batch: Batch, seed: int, counts: Sequence[int], shape: torch.Size) -> Tensor:
    """A method's training noise: uniform numbers in [0, 1), float32 of `shape` [B, N, ...]; 1 past a row's count.

    They follow from the seed, the optimiser step and the row: a batch that recurs every epoch does not meet the same
    noise each time, and a row meets the same in whatever part of the batch it is. They are drawn on the CPU, where a
    seed means the same on every machine, and a resumed run need not restore a generator.
    """
    drawn = torch.ones(shape)
    for row, count in enumerate(counts):
        row_seed = row if batch.row_seeds is None else batch.row_seeds[row]
        # A generator on the CPU keeps 32 bits of its seed.
        generator = torch.Generator().manual_seed(number_of(f"{seed} {batch.step} {row_seed}"))
        drawn[row, :count] = torch.rand((count, *shape[2:]), generator=generator)
    return drawn.to(batch.ids.device)


def number_of(name: str) -> int:
    """A number of 32 bits that stands for a name, the same in every process."""
    return zlib.crc32(name.encode())


def padded(examples: list[Example], max_tokens: int) -> Batch:
    """One example per row, padded to a multiple of LENGTH_STEP; padding has id 0 and mask False."""
    lengths = [min(len(example.ids), max_tokens) for example in examples]
    width = padded_length(max(lengths))

    def stacked(name: str) -> Tensor:
        first = getattr(examples[0], name)
        rows = first.new_zeros((len(examples), width, *first.shape[1:]))
        for row, example, length in zip(rows, examples, lengths, strict=True):
            row[:length] = getattr(example, name)[:length]
        return rows

    return Batch(
        ids=stacked("ids").long(),
        mask=stacked("mask").bool(),
        taps=stacked("taps"),
        last=stacked("last"),
        lengths=torch.tensor(lengths),
        row_seeds=tuple(number_of(example.row_id) for example in examples),
    )


def lane_width(longest: int, batch_tokens: int, multiple: int) -> int:
    """Width of a lane: at least `longest`, a multiple of `multiple`, such that whole lanes fill batch_tokens."""
    least = -(-longest // multiple) * multiple
    num_lanes = max(1, batch_tokens // least)
    return max(least, batch_tokens // num_lanes // multiple * multiple)


def first_fit_decreasing(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Indices of lengths, lane by lane; no lane holds more than width."""
    lanes: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        lane = next((lane for lane, free in enumerate(room) if free >= lengths[index]), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            room.append(width)
        lanes[lane].append(index)
        room[lane] -= lengths[index]
    return lanes


def in_order(lengths: Sequence[int], width: int) -> list[tuple[int, int]]:
    """(lane, first column) of each length: into the current lane while it has room, else into the next.

    Of all ways to keep the order this takes the fewest lanes, so rows packed lane after lane fit again.
    """
    places, lane, used = [], 0, 0
    for length in lengths:
        if used and used + length > width:
            lane, used = lane + 1, 0
        places.append((lane, used))
        used += length
    return places


def packed(examples: Sequence[Example], max_tokens: int, width: int) -> Batch:
    """Examples in lanes of `width` columns, in their order; each is cut to its first max_tokens tokens.

    mask is False at every first token: no draft may cross from one conversation into the next (layers.py).
    """
    lengths = [min(len(example.ids), max_tokens) for example in examples]
    assert max(lengths) <= width
    places = in_order(lengths, width)
    shape = (places[-1][0] + 1, width)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    numbers, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    first = examples[0]
    taps, last = (part.new_zeros((*shape, part.shape[-1])) for part in (first.taps, first.last))
    used = torch.zeros(shape[0], dtype=torch.int64)
    for number, (example, length, (lane, start)) in enumerate(zip(examples, lengths, places, strict=True)):
        columns = slice(start, start + length)
        ids[lane, columns], mask[lane, columns] = example.ids[:length], example.mask[:length]
        mask[lane, start] = False
        numbers[lane, columns], positions[lane, columns] = number, torch.arange(length)
        taps[lane, columns], last[lane, columns] = example.taps[:length], example.last[:length]
        used[lane] = start + length
    return Batch(
        ids,
        mask,
        taps,
        last,
        used,
        documents=Documents(numbers, positions),
        row_seeds=tuple(
            number_of(example.row_id) for example, (_, start) in zip(examples, places, strict=True) if not start
        ),
    )
