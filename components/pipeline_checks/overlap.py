"""The rule that no pipeline trains on what it benchmarks, checked from the settings before anything is read or run.

The rows that reach `drafts.train_draft` are followed back to the sources that steps name, and so are the prompts that
reach `bench.*`. One step that gives both has split them itself, so that they share no question. Two steps that name
one file, or one split of one data set, are refused, unless their splits agree (components/data/sources/overlap.py),
or `data.deduplicate` takes the ones out of the others. The same question in two files cannot be seen in
the settings: that step finds it in the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from components.contract import UserError
from components.data.sources.overlap import Origin, after_split, origins_of, share_questions
from components.pipeline_checks.step_view import Fault, StepView, names_in

_CARRY_ROWS: Final = ("Chats", "Prompts", "Conversations", "Features", "Draft")
"""Kinds through which rows travel to training; a target was trained by others, a corpus is not what drafters learn."""
_ONLY_COMPARED: Final = ("keep_out", "seen")
"""Inputs that a step only compares with: their rows do not reach its output."""


def check_train_eval_overlap(steps: Sequence[StepView]) -> Iterator[Fault]:
    """A fault for every source that one step trains on and another one benchmarks."""
    by_name = {step.name: step for step in steps}
    trained: dict[str, StepView] = {}
    benchmarked: dict[str, StepView] = {}
    for step in steps:
        if step.address == "drafts.train_draft":
            trained |= {giver.name: giver for giver in _prompt_sources(step, by_name)}
        if step.address.startswith("bench."):
            benchmarked |= {above.name: above for above in _input_steps(step, by_name) if above.kind == "Prompts"}
    for giver in trained.values():
        for benchmark in benchmarked.values():
            if giver.base != benchmark.base:
                yield from _shared_sources(giver, benchmark, by_name)


def _shared_sources(giver: StepView, benchmark: StepView, by_name: Mapping[str, StepView]) -> Iterator[Fault]:
    for reader, read, kept_out in _origins(giver, by_name, frozenset()):
        for _, bench_origin, _ in _origins(benchmark, by_name, frozenset()):
            origin, benchmarked = after_split(read, giver.settings), after_split(bench_origin, benchmark.settings)
            if not share_questions(origin, benchmarked) or (
                benchmark.name in kept_out and not benchmarked.is_benchmark
            ):
                continue
            if not benchmarked.is_benchmark:
                remedy = f"benchmark the prompts of '{giver.base}', which are split by one step, or wire "
                remedy += f"'{benchmark.base}' into `keep_out` of data.deduplicate"
            else:
                remedy = "it is a benchmark as a whole: train on other rows, or on another split"
            location = f"'{benchmark.base}' (line {benchmark.line})"
            yield Fault(reader.base, f"trains on {origin.source}, which {location} benchmarks: {remedy}")


def _prompt_sources(step: StepView, by_name: Mapping[str, StepView]) -> Iterator[StepView]:
    """The steps whose Prompts reach a step, the nearest on each way: they split what comes from further up."""
    for above in _input_steps(step, by_name):
        if above.kind == "Prompts":
            yield above
        else:
            yield from _prompt_sources(above, by_name)


def _origins(
    step: StepView, by_name: Mapping[str, StepView], kept_out: frozenset[str]
) -> Iterator[tuple[StepView, Origin, frozenset[str]]]:
    """(step, origin, prompts kept out on the way) for every source named by a step or by those whose rows it takes."""
    kept_out = kept_out.union(names_in(step.inputs.get("keep_out", [])))
    room, _, name = step.address.partition(".")
    if room == "data":
        with contextlib.suppress(UserError):  # a malformed source is told by the step that reads it
            yield from ((step, origin, kept_out) for origin in origins_of(name, step.settings))
    for above in _input_steps(step, by_name):
        yield from _origins(above, by_name, kept_out)


def _input_steps(step: StepView, by_name: Mapping[str, StepView]) -> Iterator[StepView]:
    """The steps whose rows a step takes in; inputs from outside the pipeline are not included."""
    for parameter, references in step.inputs.items():
        if parameter in _ONLY_COMPARED:
            continue
        for name in names_in(references):
            source_step = by_name.get(name)
            if source_step is not None and source_step.kind in _CARRY_ROWS:
                yield source_step
