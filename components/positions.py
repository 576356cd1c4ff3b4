"""How many positions of its target a step takes, told from its settings before anything runs.

A target reads texts of at most so many tokens. Measuring needs room for more than a prompt and its answer: a block of
`bench.measure_step_cost` decodes on behind a cache of the length it is asked for, and the last round of an answer may
draft past its end. Training comes before those steps and takes hours, so they are held against the target as soon as
its configuration can be read: when a pipeline is checked, or when the step that makes the target has made it. The step
that answers prompts writes down how long those for the benchmarks are, and these are held against it as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.outside_json import read_json

ROOM_FOR_GUESSES: Final = 65
"""Tokens past its limit that the deepest tail round of an answer may compute."""
SPREAD: Final = 1 / 8
"""Of a KV length, to each side, by which the lengths of a batch differ."""
SHORTEST_CACHE: Final = 16
"""Tokens of the shortest cache, and of the shortest block, that bench.measure_step_cost takes."""
ROOM_BEHIND_ANSWERS: Final[Mapping[str, int]] = {
    "bench.compare_end_to_end": ROOM_FOR_GUESSES,
    "bench.compare_stop": ROOM_FOR_GUESSES,
    "bench.measure_acceptance": 1,
    "bench.measure_server": 0,
}
"""Steps whose answers have up to `max_new_tokens` -> positions behind an answer that they need in any case."""

LEAST_SHARE: Final = 0.5
"""Share of the test prompts that must fit the target for numbers that are to be true of them."""
MUST_HOLD_MOST: Final = ("bench.measure_acceptance", "bench.compare_end_to_end", "bench.compare_stop")
"""Steps whose numbers are of the test prompts: they refuse to leave out more than that."""
_LENGTHS_FILE: Final = "test_prompt_lengths.json"


@dataclass(frozen=True)
class PromptLength:
    """How long a prompt is. tokens: as the target reads it. characters: of its question."""

    tokens: int
    characters: int


def write_prompt_lengths(folder: Path, lengths: Iterable[PromptLength]) -> None:
    """Write down how long the test prompts are beside the answers of the others."""
    pairs = [[length.tokens, length.characters] for length in lengths]
    (folder / _LENGTHS_FILE).write_text(json.dumps(pairs) + "\n", encoding="utf-8")


def read_prompt_lengths(folder: Path) -> list[PromptLength]:
    """The lengths of the test prompts that an artifact of answers has written down; [] where it has not."""
    file = folder / _LENGTHS_FILE
    return [PromptLength(*pair) for pair in read_json(file)] if file.is_file() else []


def prompts_left_out(
    lengths: Sequence[PromptLength], split: str, positions: int, new_tokens: int, least_share: float
) -> tuple[str, str]:
    """(how many prompts leave no room for `new_tokens` more, the fault and how to mend it); "" where there is none.

    least_share: of the prompts, that must fit.
    """
    room = positions - new_tokens
    too_long = [length for length in lengths if length.tokens > room]
    if not too_long:
        return "", ""
    counted = (
        f"{len(too_long)} of {len(lengths)} {split} prompts do not fit the target's {positions} positions with"
        f" {new_tokens} tokens for an answer and drafts"
    )
    if len(lengths) - len(too_long) >= least_share * len(lengths):
        return counted, ""
    lower = sorted(length.tokens for length in lengths)[(len(lengths) - 1) // 2] - room
    mend = f"max_new_tokens lower by {lower} lets half of them in, or " * (lower < new_tokens - ROOM_FOR_GUESSES - 1)
    shortest = min(length.characters for length in too_long)
    shorter = f"give shorter prompts (data.collect_prompts with max_prompt_characters: {max(1, shortest - 1)})"
    return counted, f"{counted}, so the others would not speak for them: {mend}{shorter}"


def prompts_fault(
    address: str, settings: Mapping[str, Any], positions: int, lengths: Sequence[PromptLength]
) -> tuple[str, str]:
    """prompts_left_out of the test prompts in a step that measures with them; settings: of the step, checked."""
    if address not in MUST_HOLD_MOST or not settings:
        return "", ""
    new_tokens = settings["max_new_tokens"] + ROOM_BEHIND_ANSWERS[address]
    return prompts_left_out(lengths, "test", positions, new_tokens, LEAST_SHARE)


def longest_context(kv_lengths: Sequence[int], batch_sizes: Sequence[int], tokens: int) -> int:
    """Positions that the longest sequence of any cell takes, before drafts. tokens: of a block."""
    longest = max(kv_lengths)
    return longest + tokens + (round(longest * SPREAD) if max(batch_sizes) > 1 else 0)


def positions_fault(address: str, settings: Mapping[str, Any], positions: int) -> tuple[str, str]:
    """(setting, its fault and how to mend it) of a step that cannot work with so many positions; else ("", "").

    settings: of the step, checked; without them nothing is wrong here.
    """
    if address == "bench.measure_step_cost" and settings:
        return _step_cost_fault(
            settings["kv_lengths"], settings["batch_sizes"], settings["tokens_per_block"], positions
        )
    behind = ROOM_BEHIND_ANSWERS.get(address)
    if behind is None or not settings or settings["max_new_tokens"] + behind < positions:
        return "", ""
    drafts = f" and {behind} for drafts" if behind > 1 else ""
    new = f"{settings['max_new_tokens']} new tokens{drafts}"
    fault = f"{new} leave no room for a prompt in the target's {positions} positions"
    most = positions - behind - 1
    return "max_new_tokens", f"{fault}: " + (f"ask for fewer than {most}" if most > 2 else "take another target")


def _step_cost_fault(
    kv_lengths: Sequence[int], batch_sizes: Sequence[int], tokens: int, positions: int
) -> tuple[str, str]:
    needed = longest_context(kv_lengths, batch_sizes, tokens) + ROOM_FOR_GUESSES
    if needed <= positions:
        return "", ""
    spread = f", an eighth of it for a batch of {max(batch_sizes)}" if max(batch_sizes) > 1 else ""
    fault = (
        f"{max(kv_lengths)} tokens{spread}, a block of {tokens} (tokens_per_block) and {ROOM_FOR_GUESSES} for drafts"
        f" need {needed} positions, and the target has {positions}"
    )
    for block in (tokens, SHORTEST_CACHE):
        room = positions - ROOM_FOR_GUESSES
        lengths = range(room - block, SHORTEST_CACHE - 1, -1)
        fits = next((length for length in lengths if longest_context([length], batch_sizes, block) <= room), None)
        if fits is not None:
            shorter = f" with tokens_per_block: {block}" if block != tokens else ""
            return "kv_lengths", f"{fault}: ask for at most {fits}{shorter}"
    return "kv_lengths", f"{fault}: its costs cannot be measured"
