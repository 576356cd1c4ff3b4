"""Rules on settings that another step decides: a measuring step agrees with the `bench.autotune` that it takes, and a
drafter of `method: auto` is given the drafter whose method that is.

The step itself refuses a contradiction too (components/bench/calibration.py), but by then a drafter has been trained.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from components.methods import AUTO
from components.pipeline_checks.step_view import Fault, StepView

AUTOTUNE: Final = "bench.autotune"
TUNING: Final = "tuning"


def check_tuning_consistency(steps: Sequence[StepView]) -> Iterator[Fault]:
    """Each contradiction between a step and its tuning once, however many combinations of a matrix repeat it."""
    by_name = {step.name: step for step in steps}
    faults: dict[Fault, None] = {}
    for step in steps:
        tuner = by_name.get(str(step.inputs.get(TUNING)))
        if tuner is not None and tuner.address == AUTOTUNE:
            faults |= dict.fromkeys(_contradictions(step, tuner, by_name))
    yield from faults


def check_method_known(steps: Sequence[StepView]) -> Iterator[Fault]:
    """Each step of `method: auto` that goes on from no drafter, once."""
    reason = "method: auto is the method of start_from: give that under 'in', or name a method"
    lost = [step.base for step in steps if step.settings.get("method") == AUTO and "start_from" not in step.inputs]
    for base in dict.fromkeys(lost):
        yield Fault(base, reason, ("with", "method"))


def _contradictions(step: StepView, tuner: StepView, by_name: Container[object]) -> Iterator[Fault]:
    if step.settings.get("num_threads"):
        reason = f"'{tuner.base}' chooses the threads: leave num_threads out, or the input 'tuning'"
        yield Fault(step.base, reason, ("with", "num_threads"))
    # a step whose settings are wrong has none, and that is reported elsewhere
    dtype, tuned_dtype = step.settings.get("dtype"), tuner.settings.get("dtype")
    if None not in (dtype, tuned_dtype) and dtype != tuned_dtype:
        reason = f"dtype is {dtype}, and '{tuner.base}' chooses for {tuned_dtype}: give both the same"
        yield Fault(step.base, reason, ("with", "dtype"))
    target, tuned = step.inputs.get("target"), tuner.inputs.get("target")
    if target in by_name and tuned in by_name and target != tuned:  # what comes from outside has many names
        reason = f"it measures '{target}', and '{tuner.base}' chooses for '{tuned}': give each its own"
        yield Fault(step.base, reason, ("in", TUNING))
