"""Checks from the settings, before anything runs, that a measuring step agrees with its tuning input.

The step itself refuses it too (components/bench/tuning.py), but by then a drafter has been trained.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flows.wiring import WiredStep

AUTOTUNE = "bench.autotune"
TUNING = "tuning"


def check_tuning_consistency(steps: Sequence[WiredStep]) -> Iterator[tuple[str, str, str, str]]:
    """(step, fault, section: "with" or "in", name in that section) for every step that contradicts the
    `bench.autotune` it takes."""
    by_name = {step.name: step for step in steps}
    problems: dict[tuple[str, str, str, str], None] = {}
    for step in steps:
        giver = by_name.get(str(step.inputs.get(TUNING)))
        if giver is not None and giver.function.address == AUTOTUNE:
            problems |= dict.fromkeys((step.base, *problem) for problem in _contradictions(step, giver, by_name))
    yield from problems


def _contradictions(step: WiredStep, giver: WiredStep, by_name: Container[object]) -> Iterator[tuple[str, str, str]]:
    if step.settings.get("num_threads"):
        reason = f"'{giver.base}' chooses the threads: leave num_threads out, or the input 'tuning'"
        yield reason, "with", "num_threads"
    dtype, tuned_dtype = (
        step.settings.get("dtype"),
        giver.settings.get("dtype"),
    )  # {} of a step whose settings are wrong
    if None not in (dtype, tuned_dtype) and dtype != tuned_dtype:
        yield f"dtype is {dtype}, and '{giver.base}' chooses for {tuned_dtype}: give both the same", "with", "dtype"
    target, tuned = step.inputs.get("target"), giver.inputs.get("target")
    if target in by_name and tuned in by_name and target != tuned:  # what comes from outside has many names
        yield f"it measures '{target}', and '{giver.base}' chooses for '{tuned}': give each its own", "in", TUNING
