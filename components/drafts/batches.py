"""Training batches in an order that only the seed decides.

Rows are shuffled by (seed, epoch), sorted by length inside pools of a few batches so that little is padding, cut into
batches of at most `batch_tokens` padded tokens, and the batches of a pool are shuffled again. Step s always gets the
same batch, so a resumed run needs no saved generator: it counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from components.data.features import Example, FeatureRow, FeatureSet
from components.drafts.draft import Batch

BATCHES_IN_POOL = 8
LENGTH_STEP = 32  # padded lengths are multiples of this: oneDNN compiles and keeps a bf16 kernel for every new shape


@dataclass(frozen=True)
class BatchOrder:
    """Which rows make up which batch. Sizes in tokens."""

    rows: tuple[FeatureRow, ...]
    batch_tokens: int
    max_tokens: int
    seed: int

    def length(self, row: FeatureRow) -> int:
        """Tokens of a row that are used."""
        return min(row.num_tokens, self.max_tokens)

    def epoch(self, number: int) -> list[list[FeatureRow]]:
        """The batches of one pass over the rows."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = [self.rows[i] for i in torch.randperm(len(self.rows), generator=generator).tolist()]
        mean = sum(map(self.length, order)) / len(order)
        pool_size = max(1, int(BATCHES_IN_POOL * self.batch_tokens / mean))
        batches: list[list[FeatureRow]] = []
        for start in range(0, len(order), pool_size):
            pool = self._cut(sorted(order[start : start + pool_size], key=self.length))
            batches += [pool[i] for i in torch.randperm(len(pool), generator=generator).tolist()]
        return batches

    def from_step(self, step: int) -> Iterator[list[FeatureRow]]:
        """Batches of steps `step`, `step` + 1, ... without end; step 0 is the first."""
        number = 0
        while True:
            batches = self.epoch(number)
            yield from batches[step:]
            step, number = max(0, step - len(batches)), number + 1

    def _cut(self, ascending: list[FeatureRow]) -> list[list[FeatureRow]]:
        batches: list[list[FeatureRow]] = [[]]
        for row in ascending:  # ascending: the newcomer is the longest and sets the padded length
            if batches[-1] and (len(batches[-1]) + 1) * padded_length(self.length(row)) > self.batch_tokens:
                batches.append([])
            batches[-1].append(row)
        return batches


def padded_length(num_tokens: int) -> int:
    """The next multiple of LENGTH_STEP."""
    return -(-num_tokens // LENGTH_STEP) * LENGTH_STEP


def step_generator(batch: Batch, seed: int) -> torch.Generator:
    """For what a method draws while training: the same optimiser step and seed give the same numbers.

    By the step, not by the batch: a row that comes alone every epoch must not meet the same noise each time. It lives
    on the CPU, where a seed means the same on every machine, and nothing of it needs saving for a resumed run.
    """
    return torch.Generator().manual_seed(seed * 1_000_003 + batch.step)


def load_batch(features: FeatureSet, rows: list[FeatureRow], max_tokens: int, device: torch.device) -> Batch:
    """Read rows and pad them to the right; features become float32."""
    return padded([features.load(row) for row in rows], max_tokens, device)


def padded(examples: list[Example], max_tokens: int, device: torch.device) -> Batch:
    """Examples side by side, padded to a multiple of LENGTH_STEP: ids 0 and mask False on padding."""
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
