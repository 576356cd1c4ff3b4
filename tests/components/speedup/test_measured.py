"""The limits of ties: what rounding makes passes, nearly always; what it does not make does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from simulated_rows import make_request

from components.rows import Request
from components.speedup.measured import FALSE_ALARM, SLACK, Ties, ties_of


def compared(num_prompts: int, reps: int = 1, **facts: Any) -> list[Request]:
    values = {"identical": False, "tie": True, "tie_chance": 0.5, "rounded_tokens": 1, "rounded_expected": 1.0, **facts}
    return [make_request("eagle3", 1, prompt, 65, 1.0, **values) for prompt in range(num_prompts) for _ in range(reps)]


def tail(rate: float, limit: float) -> float:
    """P(more than `limit` events), Poisson: the widest sum of independent events with this expected number."""
    terms = np.arange(math.floor(limit) + 1, math.floor(limit) + 400)
    logs = terms * math.log(rate) - rate - np.array([math.lgamma(term + 1.0) for term in terms])
    return float(np.exp(logs).sum())


@pytest.mark.parametrize("expected", [1e-6, 1e-3, 0.02, 0.066, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 2000.0])
def test_rounding_passes_in_all_but_one_of_ten_thousand_arms_even_where_it_makes_more_than_expected(
    expected: float,
) -> None:
    limit = ties_of(compared(1, rounded_expected=expected)).rounded_tokens_limit
    assert limit is not None
    assert tail(SLACK * expected, limit) <= FALSE_ALARM
    assert limit == 1.0 or tail(SLACK * expected, limit - 1.0) > FALSE_ALARM, "and no more than needed"


def test_twice_the_ties_are_found_once_sixty_are_expected() -> None:
    """Power: 60 are expected of 64 outputs of 96 tokens in bfloat16; 120 pass the limit now and then, 180 always do."""
    limit = ties_of(compared(64, rounded_expected=60 / 64)).rounded_tokens_limit
    assert limit is not None and tail(180.0, limit) > 0.99, "three times as many are as good as always found"
    assert 0.1 < tail(120.0, limit) < 0.9


def test_a_single_tie_passes_where_none_is_expected_and_a_second_does_not() -> None:
    clean = compared(24, identical=True, tie=None, tie_chance=1e-6, rounded_tokens=0, rounded_expected=1e-6)
    tied = compared(24, tie_chance=1e-6, rounded_tokens=1, rounded_expected=1e-6)
    assert not ties_of(clean).too_many
    assert not ties_of([tied[0], *clean[1:]]).too_many
    assert ties_of([*tied[:2], *clean[2:]]).too_many


def test_outputs_of_one_prompt_count_as_one() -> None:
    """Repetitions part at the same place: they are no more evidence than one."""
    once, often = ties_of(compared(8)), ties_of(compared(8, reps=5))
    assert once == often
    assert (once.tied_share, once.rounded_tokens) == (1.0, 8.0)


def test_nothing_is_claimed_of_rows_that_do_not_tell() -> None:
    assert ties_of([]) == Ties() and not Ties().too_many
    old = ties_of(compared(8, tie_chance=None, rounded_tokens=None, rounded_expected=None))
    assert (old.tied_share, old.tied_share_limit, old.rounded_tokens_limit, old.too_many) == (1.0, None, None, False)
