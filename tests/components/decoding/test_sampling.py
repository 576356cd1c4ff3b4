"""A distribution after temperature and cuts is what Sampling says it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.decoding.sampling import draw, probabilities
from components.drafts.draft import Sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


def test_temperature_one_without_cuts_is_softmax() -> None:
    torch.testing.assert_close(probabilities(LOGITS, Sampling(1.0)), LOGITS.softmax(-1))


def test_temperature_divides_the_logits() -> None:
    torch.testing.assert_close(probabilities(LOGITS, Sampling(0.5)), (2 * LOGITS).softmax(-1))


def test_top_k_keeps_k_tokens_in_their_proportions() -> None:
    probs = probabilities(LOGITS, Sampling(1.0, top_k=2))
    full = LOGITS.softmax(-1)
    torch.testing.assert_close(probs[0, :2], full[0, :2] / full[0, :2].sum())
    assert probs[0, 2:].sum() == 0


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.64, 2), (0.88, 3), (1.0, 5)])
def test_top_p_keeps_the_token_that_crosses_the_line(top_p: float, kept: int) -> None:
    # The masses are 0.636, 0.234, 0.086, 0.032, 0.012.
    assert int((probabilities(LOGITS, Sampling(1.0, top_p=top_p)) > 0).sum()) == kept


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30), min_size=1, max_size=40),
    temperature=st.floats(0.05, 5.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 50),
)
def test_a_distribution_sums_to_one_and_keeps_the_most_probable_token(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    row = torch.tensor([logits])
    probs = probabilities(row, Sampling(temperature, top_p, top_k))
    assert probs.sum() == pytest.approx(1.0, abs=1e-5)
    assert (probs >= 0).all()
    assert probs[0, row[0].argmax()] > 0
    if top_k:
        assert int((probs > 0).sum()) <= top_k


def test_the_same_seed_draws_the_same_tokens() -> None:
    probs = LOGITS.softmax(-1).expand(50, 5)
    first, second = (draw(probs, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, draw(probs, torch.Generator().manual_seed(8)))
