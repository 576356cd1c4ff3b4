"""Prompts are spread over their split, and an answer is kept to its end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from components.bench.prompts import kept_length, spread


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(0, 4))
def test_an_answer_is_kept_up_to_and_including_its_end(tokens: list[int], end: int) -> None:
    kept = tokens[: kept_length(tokens, {end})]
    assert end not in kept[:-1]
    assert kept == tokens or kept[-1] == end


def test_prompts_are_spread_over_the_split() -> None:
    everything = list(range(24))
    assert spread(everything, 12) == everything[::2]  # type: ignore[arg-type]
    assert spread(everything, 30) == everything  # type: ignore[arg-type]
