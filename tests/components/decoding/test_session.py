"""Drawing keeps the seed's promise, and what is drawn from is a distribution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from components.decoding.session import draw, is_greedy
from components.drafts.interface import Sampling
from components.drafts.network.sampling import probabilities

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])


def test_greedy_is_temperature_zero() -> None:
    assert is_greedy(Sampling())
    assert not is_greedy(Sampling(temperature=0.1))


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


@pytest.mark.parametrize("rows", [1, 3])
def test_of_equal_logits_top_k_keeps_those_with_the_lower_id(rows: int) -> None:
    row = torch.tensor([0.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0]).expand(rows, 7)
    kept = probabilities(row, Sampling(1.0, top_k=4)) > 0
    assert kept.tolist() == [[False, True, True, True, True, False, False]] * rows


def test_the_same_seed_draws_the_same_tokens() -> None:
    probs = LOGITS.softmax(-1).expand(50, 5)
    first, second = (draw(probs, torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, draw(probs, torch.Generator().manual_seed(8)))
