"""What a step asks of its target's positions, and that what is suggested instead fits and is the most that does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from components.positions import (
    ROOM_FOR_GUESSES,
    PromptLength,
    longest_context,
    positions_fault,
    prompts_fault,
    prompts_left_out,
    read_prompt_lengths,
    write_prompt_lengths,
)

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


@given(st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(1, 400))
def test_prompts_left_out_are_counted_and_what_is_suggested_lets_half_of_them_in(
    tokens: list[int], new_tokens: int
) -> None:
    positions, lengths = 400, [PromptLength(number, 4 * number) for number in tokens]
    fitting = sum(number + new_tokens <= positions for number in tokens)
    counted, fault = prompts_left_out(lengths, "test", positions, new_tokens, 0.5)
    assert bool(counted) == (fitting < len(tokens)) and bool(fault) == (2 * fitting < len(tokens))
    if counted:
        assert counted.startswith(f"{len(tokens) - fitting} of {len(tokens)} test prompts do not fit")
    if lower := re.search(r"max_new_tokens lower by (\d+) ", fault):
        assert not prompts_left_out(lengths, "test", positions, new_tokens - int(lower[1]), 0.5)[1]
    if characters := re.search(r"max_prompt_characters: (\d+)\)", fault):
        short = [length for length in lengths if length.characters <= int(characters[1])]
        assert prompts_left_out(short, "test", positions, new_tokens, 0.5) == ("", "")


def test_only_steps_that_speak_for_the_prompts_refuse_to_leave_most_of_them_out(tmp_path: Path) -> None:
    write_prompt_lengths(tmp_path, [PromptLength(100, 410), PromptLength(120, 400)])
    lengths, settings = read_prompt_lengths(tmp_path), {"max_new_tokens": 96}
    counted, fault = prompts_fault("bench.compare_end_to_end", settings, 256, lengths)
    assert counted.startswith("2 of 2 test prompts") and fault.endswith("max_prompt_characters: 399)")
    assert "max_new_tokens lower by 5 lets half of them in" in fault
    assert prompts_fault("bench.compare_end_to_end", settings, 281, lengths) == ("", "")
    assert prompts_fault("bench.measure_acceptance", settings, 256, lengths) == ("", "")
    assert prompts_fault("bench.measure_step_cost", {"kv_lengths": [16]}, 256, lengths) == ("", "")
    assert read_prompt_lengths(tmp_path / "of an older version") == []
