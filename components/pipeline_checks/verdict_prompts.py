"""The rule that settings leave a verdict the prompts it needs, checked before anything is collected or trained.

What a file really has is told by `check` and `plan` where it is small enough to be read, and refused by the engine once
the prompts are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from components.contract import UserError
from components.data.sources.python_stdlib import STDLIB
from components.outside_json import JsonObject
from components.pipeline_checks.step_view import Fault, StepView
from components.refusals import PROMPTS, evidence_of, too_few_prompts

MOST_BYTES: Final = 1 << 20
"""Of a file of prompts that is read to count them; a larger one has enough."""


def check_verdict_prompts(steps: Sequence[StepView]) -> Iterator[Fault]:
    """Each setting that leaves fewer test prompts than a verdict of the pipeline needs."""
    by_name = {step.name: step for step in steps}
    faults: dict[Fault, None] = {}  # a matrix repeats them
    for evidence in evidence_of({step.name: (step.address, step.inputs) for step in steps}):
        for step in (by_name[name] for name in evidence.measured):
            fault = too_few_prompts(step.settings.get("num_prompts", PROMPTS.decide), [step.settings])
            faults |= {Fault(step.base, fault, ("with", "num_prompts")): None} if fault else {}
        sources = [by_name[name] for name in evidence.prompts if name in by_name]
        most = [step.settings.get("num_test", PROMPTS.decide) for step in sources]
        if len(sources) == len(evidence.prompts) and (
            fault := too_few_prompts(sum(most), [s.settings for s in sources])
        ):
            faults[Fault(sources[0].base, fault, ("with", "num_test"))] = None
    yield from faults


class SeenStep(NamedTuple):
    """A step as `check` or `plan` has it."""

    name: str
    line: int
    address: str
    settings: JsonObject
    inputs: Mapping[str, str | list[str]]


def few_prompts(steps: Sequence[SeenStep]) -> Iterator[str]:
    """A line for every file on this machine that has too few test prompts for a verdict of these steps."""
    by_name = {step.name: step for step in steps}
    all_evidence = evidence_of({each.name: (each.address, each.inputs) for each in steps})
    for name, *others in dict.fromkeys(evidence.prompts for evidence in all_evidence):
        step = by_name.get(name)
        if step is None or others or step.address != "data.collect_prompts":
            continue
        if step.settings["source"] == STDLIB:  # it has thousands, and the readers of files take a while to load
            continue
        from components.data.collect.prompts import count_test_prompts

        with suppress(UserError):  # it is not there, which is told, or cannot be read, which the step tells
            number = count_test_prompts(step.settings, MOST_BYTES)
            if number is not None and (few := too_few_prompts(number, [step.settings])):
                yield f"{step.line}: step '{step.name}': source: {step.settings['source']}: {few}"
