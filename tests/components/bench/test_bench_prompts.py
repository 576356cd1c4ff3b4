"""Prompts are spread over their split, and an answer is kept to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_targets import make_tiny_target

from components.bench.prompts import fitting_prompts, kept_length, num_positions, spread
from components.contract import Context, Prompts, Target, UserError
from components.data.formats.prompts import Prompt, write_prompts
from components.positions import LEAST_SHARE


@given(st.lists(st.integers(0, 4), max_size=20), st.integers(0, 4))
def test_an_answer_is_kept_up_to_and_including_its_end(tokens: list[int], end: int) -> None:
    kept = tokens[: kept_length(tokens, {end})]
    assert end not in kept[:-1]
    assert kept == tokens or kept[-1] == end


def test_prompts_are_spread_over_the_split() -> None:
    everything = list(range(24))
    assert spread(everything, 12) == everything[::2]  # type: ignore[arg-type]
    assert spread(everything, 30) == everything  # type: ignore[arg-type]


def test_prompts_that_do_not_fit_are_counted_and_refused_where_they_are_most(tmp_path: Path) -> None:
    target = Target(key="t", path=make_tiny_target("llama", tmp_path / "model"))
    write_prompts(tmp_path, [Prompt(f"p{n}", "test", "w", "s", "a b " * 20 * (n + 1), None) for n in range(6)])
    prompts, events = Prompts(key="p" * 64, path=tmp_path), list[dict[str, Any]]()
    ctx = Context(key="k", out=tmp_path, scratch=tmp_path, num_threads=1, send=events.append)
    whole = fitting_prompts(target, prompts, "test", 0, ctx, least_share=LEAST_SHARE)
    assert len(whole) == 6 and not events
    lengths, positions = [len(prompt.ids) for prompt in whole], num_positions(target)
    room = positions - lengths[3]
    assert len(fitting_prompts(target, prompts, "test", room, ctx, least_share=LEAST_SHARE)) == 4
    notes = [event["message"] for event in events if event["event"] == "note"]
    assert len(notes) == 1 and notes[0].startswith("2 of 6 test prompts do not fit the target's 1024 positions")
    assert sum(event["event"] == "set_aside" for event in events) == 2
    with pytest.raises(UserError, match=r"5 of 6 test prompts do not fit .* max_new_tokens lower by") as refused:
        fitting_prompts(target, prompts, "test", positions - lengths[0], ctx, least_share=LEAST_SHARE)
    lower = int(str(refused.value).partition("lower by ")[2].split()[0])
    mended = positions - lengths[0] - lower
    assert len(fitting_prompts(target, prompts, "test", mended, ctx, least_share=LEAST_SHARE)) == 3
