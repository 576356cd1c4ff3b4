"""Loading batches: what is trained on is the same whether or not a thread reads ahead, and it reads what comes next."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from components.data.features.format import FeatureRow
from components.drafts.interface import Batch
from components.drafts.training.loading import Loader, MicroBatches

CPU = torch.device("cpu")
ROWS = [FeatureRow(str(number), "w", "train", "s", number, 8, 4) for number in range(6)]


def batch_of(rows: list[FeatureRow]) -> Batch:
    """A batch that says which rows it is of."""
    ids = torch.tensor([[row.index] for row in rows])
    states = torch.ones(len(rows), 1, 2, dtype=torch.bfloat16)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), states, states, torch.ones(len(rows), dtype=torch.int64))


def trained_on(loader: Loader) -> Iterator[list[int]]:
    """Two optimiser steps: the first of three parts, which are gone through twice, the second of two."""
    first, second = [[ROWS[0], ROWS[1]], [ROWS[2]], [ROWS[3]]], [[ROWS[4]], [ROWS[5]]]
    for step, (parts, after) in enumerate([(first, second[0]), (second, None)]):
        batches = MicroBatches(loader, parts, after, step)
        for batch in (*batches.once(again=True), *batches.once(again=False)):
            assert batch.step == step and batch.taps.dtype == batch.last.dtype == torch.float32
            yield batch.ids[:, 0].tolist()


@pytest.mark.parametrize("ahead", [False, True])
def test_every_part_comes_in_its_turn_and_is_read_once_a_turn(ahead: bool) -> None:
    read = []

    def load(rows: list[FeatureRow]) -> Batch:
        read.append([row.index for row in rows])
        return batch_of(rows)

    with Loader(load, CPU, ahead=ahead) as loader:
        seen = list(trained_on(loader))
    assert seen == [[0, 1], [2], [3]] * 2 + [[4], [5]] * 2
    assert read == seen, "nothing is read that is not asked for, and nothing twice"


def test_the_next_part_is_read_while_this_one_is_trained_on() -> None:
    """The second part can only be read after the first was handed over, and is read before it is asked for."""
    handed_over, is_read = threading.Event(), threading.Event()

    def load(rows: list[FeatureRow]) -> Batch:
        if rows == [ROWS[1]]:
            assert handed_over.wait(600), "the first part waits for the second"
            is_read.set()
        return batch_of(rows)

    with Loader(load, CPU, ahead=True) as loader:
        loader.batch([ROWS[0]], [ROWS[1]])
        handed_over.set()
        assert is_read.wait(600)
        assert loader.batch([ROWS[1]], None).ids.tolist() == [[1]]


def test_what_fails_in_the_thread_fails_the_step() -> None:
    def load(rows: list[FeatureRow]) -> Batch:
        raise OSError(f"row {rows[0].row_id} cannot be read")

    with Loader(load, CPU, ahead=True) as loader, pytest.raises(OSError, match="row 0 cannot be read"):
        loader.batch([ROWS[0]], [ROWS[1]])
