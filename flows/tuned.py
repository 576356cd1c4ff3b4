"""Does a measuring step agree with the tuning that it is given? Looked for in the settings, before anything runs.

The step itself refuses it too (components/bench/tuning.py), but by then a drafter has been trained.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.wiring import WiredStep

AUTOTUNE = "bench.autotune"
TUNING = "tuning"


def at_odds_with_tuning(steps: Sequence[WiredStep]) -> Iterator[tuple[str, str, str, str]]:
    """(step, what is wrong, where in it: "with" or "in", and the name there) for every step that contradicts the
    `bench.autotune` it takes."""
    by_name = {step.name: step for step in steps}
    found: dict[tuple[str, str, str, str], None] = {}
    for step in steps:
        giver = by_name.get(str(step.inputs.get(TUNING)))
        if giver is not None and giver.function.address == AUTOTUNE:
            found |= dict.fromkeys((step.base, *problem) for problem in _against(step, giver, by_name))
    yield from found


def _against(step: WiredStep, giver: WiredStep, made: Container[object]) -> Iterator[tuple[str, str, str]]:
    if step.settings.get("num_threads"):
        why = f"'{giver.base}' chooses the threads: leave num_threads out, or the input 'tuning'"
        yield why, "with", "num_threads"
    dtype, theirs = step.settings.get("dtype"), giver.settings.get("dtype")  # {} of a step whose settings are wrong
    if None not in (dtype, theirs) and dtype != theirs:
        yield f"dtype is {dtype}, and '{giver.base}' chooses for {theirs}: give both the same", "with", "dtype"
    target, tuned = step.inputs.get("target"), giver.inputs.get("target")
    if target in made and tuned in made and target != tuned:  # what comes from outside has many names
        yield f"it measures '{target}', and '{giver.base}' chooses for '{tuned}': give each its own", "in", TUNING
