"""A row's states are those of a pass of the row alone to bf16 rounding, whatever it was batched and padded with."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_targets import FAMILIES, VOCAB_SIZE, Family, make_tiny_target
from torch import Tensor

from components.contract import UserError
from components.data.features.passes import forward_pass, forward_passes, group_rows, padded_tokens
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

Lengths = st.lists(st.integers(1, 70), min_size=1, max_size=7)


@functools.cache
def target(family: Family) -> AbstractTarget:
    with tempfile.TemporaryDirectory() as folder:
        return open_target(make_tiny_target(family, Path(folder)), dtype="float32", kernel="plain")


def rows_of(lengths: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def off_by(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of bf16's rounding of the largest state of its token."""
    unit = wanted.float().abs().amax(-1, keepdim=True) * 2.0**-8
    return float(((found.float() - wanted.float()).abs() / unit).max())


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(lengths=Lengths, tokens_per_pass=st.integers(1, 300), seed=st.integers(0, 99))
def test_states_do_not_depend_on_the_company(
    family: Family, lengths: list[int], tokens_per_pass: int, seed: int
) -> None:
    """In float32 batching moves states by far less than rounding to bf16 does, so the two differ by one step at most.

    Mixtures of experts too, as long as no router score is a near-tie; random ones have none so close.
    """
    model, rows = target(family), rows_of(lengths, seed)
    found = {
        place: states for passed in forward_passes(model, rows, tokens_per_pass) for place, states in passed.items()
    }
    assert sorted(found) == list(range(len(rows)))
    for place, row in enumerate(rows):
        alone = model.forward(row[None], model.new_cache(1, len(row)), logits="none", features=True)
        for stored, exact in zip(found[place], (alone.taps, alone.last), strict=True):
            assert exact is not None and stored.dtype == torch.bfloat16
            assert off_by(stored, exact[0]) <= 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stands_in_the_padding_reaches_no_row(family: Family) -> None:
    """The same bits whatever tokens fill the row beside: neither padding nor the neighbour is seen."""
    model, (row, short, other) = target(family), rows_of([40, 9, 9], seed=1)
    with_short, with_other = forward_pass(model, [row, short]), forward_pass(model, [row, other])
    assert all(torch.equal(a, b) for a, b in zip(with_short[0], with_other[0], strict=True))
    filled = torch.cat((short, other, other, other, other[:4]))
    longer = forward_pass(model, [row, filled])[1]
    assert all(off_by(a[:9], b) <= 1.0 for a, b in zip(longer, with_short[1], strict=True))


@given(Lengths, st.integers(1, 300))
def test_groups_hold_every_row_once_within_the_limit(lengths: list[int], tokens_per_pass: int) -> None:
    groups = group_rows(lengths, tokens_per_pass)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    sizes = [len(group) * max(lengths[place] for place in group) for group in groups]
    assert all(size <= tokens_per_pass or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
    assert padded_tokens(lengths, tokens_per_pass) == sum(sizes)


def test_states_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = open_target(make_tiny_target("llama", tmp_path), dtype="float32", kernel="plain")
    with torch.no_grad():
        model.embedding[5] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        forward_pass(model, [torch.tensor([4, 5, 6])])
