"""What a row of a tree sees is itself and what lies above it, however many rows there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.drafts.network.sampling import Ancestry, ancestor_sets, as_mask


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.integers(-1, 200), min_size=1, max_size=150))
def test_a_row_sees_its_ancestors_and_itself(choices: list[int]) -> None:
    """More rows than a machine word has bits; several rows without a parent."""
    parents = [-1 if choice < 0 or not row else choice % row for row, choice in enumerate(choices)]
    seen = as_mask(ancestor_sets(parents), len(parents))
    assert seen.dtype == torch.bool and seen.shape == (len(parents), len(parents))
    for row in range(len(parents)):
        above, at = set(), row
        while at >= 0:
            above.add(at)
            at = parents[at]
        assert set(seen[row].nonzero().flatten().tolist()) == above


def test_nodes_are_added_a_level_at_a_time() -> None:
    ancestry = Ancestry()
    assert [ancestry.add([-1, -1]), ancestry.add([1, 0, 1])] == [1, 2]
    assert ancestry.visible(2).tolist() == [
        [False, True, True, False, False],
        [True, False, False, True, False],
        [False, True, False, False, True],
    ]
    assert torch.equal(ancestry.visible()[2:], ancestry.visible(2))
    with pytest.raises(AssertionError, match="a level at a time"):
        ancestry.add([0, 2])
