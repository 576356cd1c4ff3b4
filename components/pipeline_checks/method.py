"""The rule that a drafter of `method: auto` is given the drafter whose method that is, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from components.methods import AUTO
from components.pipeline_checks.step_view import Fault, StepView


def check_method_known(steps: Sequence[StepView]) -> Iterator[Fault]:
    """Each step of `method: auto` that goes on from no drafter, once."""
    reason = "auto is the method of start_from: give that under 'in', or name a method"
    lost = [step.base for step in steps if step.settings.get("method") == AUTO and "start_from" not in step.inputs]
    for base in dict.fromkeys(lost):
        yield Fault(base, f"method: {reason}", ("with", "method"))
