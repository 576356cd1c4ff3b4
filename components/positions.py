"""How many positions of its target a step takes, told from its settings before anything runs.

A target reads texts of at most so many tokens. Measuring needs room for more than a prompt and its answer: a block of
`bench.measure_step_cost` decodes on behind a cache of the length it is asked for, and the last round of an answer may
draft past its end. Training comes before those steps and takes hours, so they are held against the target as soon as
its configuration can be read: when a pipeline is checked, or when the step that makes the target has made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

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
