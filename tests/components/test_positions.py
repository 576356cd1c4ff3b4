"""What a step asks of its target's positions, and that what is suggested instead fits and is the most that does."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from components.positions import ROOM_FOR_GUESSES, longest_context, positions_fault

STEP_COST = "bench.measure_step_cost"


def test_a_target_of_128_positions_is_told_what_fits() -> None:
    settings: dict[str, Any] = {"kv_lengths": [128], "batch_sizes": [1], "tokens_per_block": 64}
    setting, fault = positions_fault(STEP_COST, settings, 128)
    assert setting == "kv_lengths" and "need 257 positions, and the target has 128" in fault
    assert fault.endswith("ask for at most 47 with tokens_per_block: 16")
    assert positions_fault(STEP_COST, settings, 257) == ("", "")
    setting, fault = positions_fault("bench.compare_end_to_end", {"max_new_tokens": 96}, 128)
    assert setting == "max_new_tokens" and fault.endswith("in the target's 128 positions: ask for fewer than 62")
    assert positions_fault("bench.compare_end_to_end", {"max_new_tokens": 61}, 128) == ("", "")
    assert positions_fault("report.write_page", {"title": "a"}, 1) == positions_fault(STEP_COST, {}, 1) == ("", "")


@given(
    st.lists(st.integers(16, 400), min_size=1, max_size=3),
    st.lists(st.integers(1, 8), min_size=1, max_size=2),
    st.integers(16, 200),
    st.integers(60, 700),
)
def test_what_is_suggested_fits_and_no_more_does(
    kv_lengths: list[int], batch_sizes: list[int], block: int, positions: int
) -> None:
    def fault_of(lengths: list[int], tokens: int) -> str:
        settings = {"kv_lengths": lengths, "batch_sizes": batch_sizes, "tokens_per_block": tokens}
        return positions_fault(STEP_COST, settings, positions)[1]

    fault = fault_of(kv_lengths, block)
    assert bool(fault) == (longest_context(kv_lengths, batch_sizes, block) + ROOM_FOR_GUESSES > positions)
    if suggested := re.search(r"at most (\d+)(?: with tokens_per_block: (\d+))?$", fault):
        most, tokens = int(suggested[1]), int(suggested[2] or block)
        assert not fault_of([most], tokens) and fault_of([most + 1], tokens)
    elif fault:
        assert fault_of([16], 16)
