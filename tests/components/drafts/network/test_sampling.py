"""What a row of a tree sees is itself and what lies above it; likeliest tokens of many positions, a few at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.drafts.network import sampling
from components.drafts.network.sampling import Ancestry, ancestor_sets, as_mask, most_likely, most_likely_at


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


@pytest.mark.parametrize("most", [1, 21, 1 << 24])
def test_the_likeliest_tokens_of_many_positions_come_from_a_few_logits_at_a_time(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", most)
    generator = torch.Generator().manual_seed(0)
    weight, ids = torch.randn(7, 4, generator=generator), torch.arange(7) * 3
    states, sizes = torch.randn(2, 5, 4, generator=generator), []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight.T

    tokens, confidence = most_likely_at(head, states, ids)
    whole, certain = most_likely(states @ weight.T, ids)
    assert torch.equal(tokens, whole) and tokens.shape == (2, 5)
    torch.testing.assert_close(confidence, certain)
    assert sum(sizes) == 10 and max(sizes) <= max(1, most // 7)
