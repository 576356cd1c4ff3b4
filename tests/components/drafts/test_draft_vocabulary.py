"""The pruned vocabulary: which tokens, in which order, and that what engines read leads back to them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from components.drafts.network.vocabulary import (
    choose_vocabulary,
    coverage,
    default_size,
    ids_of,
    membership_of,
    offsets_of,
)

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(COUNTS, st.integers(1, 50))
def test_the_most_frequent_tokens_are_kept_and_padding_is_counted(counts: list[int], size: int) -> None:
    found = choose_vocabulary(torch.tensor(counts), size)
    ids = found.ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == min(size, len(counts))
    kept, dropped = [counts[i] for i in ids], [c for i, c in enumerate(counts) if i not in ids]
    assert not dropped or min(kept) >= max(dropped)
    padded = [i for i in ids if counts[i] == 0]
    assert found.num_padded == len(padded)
    unused = [i for i, c in enumerate(counts) if c == 0]
    assert padded == unused[: len(padded)]  # the lowest unused ids


@given(COUNTS, st.integers(1, 50))
def test_offsets_and_membership_lead_back_to_the_ids(counts: list[int], size: int) -> None:
    ids = choose_vocabulary(torch.tensor(counts), size).ids
    assert torch.equal(ids_of(offsets_of(ids)), ids)
    assert membership_of(ids, len(counts)).nonzero()[:, 0].tolist() == ids.tolist()


def test_coverage_is_the_share_of_occurrences() -> None:
    assert coverage(torch.tensor([6, 0, 3, 1]), torch.tensor([0, 3])) == 0.7
    assert coverage(torch.tensor([0, 0]), torch.tensor([0])) == 0.0


def test_default_size_stays_within_the_vocabulary() -> None:
    assert [default_size(v) for v in (100, 4096, 151_936)] == [100, 1024, 32_000]
