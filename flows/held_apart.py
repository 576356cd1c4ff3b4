"""May this pipeline train on what it benchmarks? Looked for in the settings, before anything is read or run.

The rows that reach `drafts.train_draft` are followed back to the sources that steps name, and so are the prompts that
reach `bench.*`. One step that gives both has split them itself, so that they share no question. Two steps that name
one file, or one split of one data set, are refused, unless their splits agree (components/data/row_origins.py),
or `data.deduplicate` takes the ones out of the others. What nobody can see in the settings, the same question in two
files, is for that step to find in the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from components.contract import UserError

if TYPE_CHECKING:
    from components.data.row_origins import Origin
    from flows.wiring import WiredStep

_CARRY_ROWS: Final = ("Chats", "Prompts", "Conversations", "Features", "Draft")
"""Kinds through which rows travel to training; a target was trained by others, a corpus is not what drafters learn."""
_ONLY_COMPARED: Final = ("keep_out", "seen")
"""Inputs whose rows do not come out of a step: they are kept out of it."""


def trained_on_benchmark(steps: Sequence[WiredStep]) -> Iterator[tuple[int, str]]:
    """(line, what is wrong) for every source that one step trains on and another one benchmarks."""
    by_name = {step.name: step for step in steps}
    trained: dict[str, WiredStep] = {}
    judged: dict[str, WiredStep] = {}
    for step in steps:
        if step.function.address == "drafts.train_draft":
            trained |= {giver.name: giver for giver in _givers(step, by_name)}
        if step.function.address.startswith("bench."):
            judged |= {above.name: above for above in _above(step, by_name) if _gives_prompts(above)}
    for giver in trained.values():
        for judge in judged.values():
            if giver.base != judge.base:
                yield from _shared(giver, judge, by_name)


def _shared(giver: WiredStep, judge: WiredStep, by_name: Mapping[str, WiredStep]) -> Iterator[tuple[int, str]]:
    from components.data.row_origins import dealt, share_questions

    for reader, read, kept_out in _origins(giver, by_name, frozenset()):
        for _, found, _ in _origins(judge, by_name, frozenset()):
            origin, benchmarked = dealt(read, giver.settings), dealt(found, judge.settings)
            if not share_questions(origin, benchmarked) or (judge.name in kept_out and not benchmarked.is_benchmark):
                continue
            if not benchmarked.is_benchmark:
                mend = f"benchmark the prompts of '{giver.base}', which are split by one step, or wire "
                mend += f"'{judge.base}' into `keep_out` of data.deduplicate"
            else:
                mend = "it is a benchmark as a whole: train on other rows, or on another split"
            where = f"'{judge.base}' (line {judge.line})"
            yield reader.line, f"step '{reader.base}': trains on {origin.said}, which {where} benchmarks: {mend}"


def _givers(step: WiredStep, by_name: Mapping[str, WiredStep]) -> Iterator[WiredStep]:
    """The steps whose Prompts reach a step, the nearest on each way: they split what comes from further up."""
    for above in _above(step, by_name):
        if _gives_prompts(above):
            yield above
        else:
            yield from _givers(above, by_name)


def _origins(
    step: WiredStep, by_name: Mapping[str, WiredStep], kept_out: frozenset[str]
) -> Iterator[tuple[WiredStep, Origin, frozenset[str]]]:
    """(step, origin, prompts kept out on the way) for every source named by a step or by those whose rows it takes."""
    from components.data.row_origins import origins_of

    kept_out = kept_out.union(_names(step.inputs.get("keep_out", [])))
    room, _, name = step.function.address.partition(".")
    if room == "data":
        with contextlib.suppress(UserError):  # a malformed source is told by the step that reads it
            yield from ((step, origin, kept_out) for origin in origins_of(name, step.settings))
    for above in _above(step, by_name):
        yield from _origins(above, by_name, kept_out)


def _above(step: WiredStep, by_name: Mapping[str, WiredStep]) -> Iterator[WiredStep]:
    """The steps whose rows a step takes in; what comes from outside the pipeline is not known here."""
    for parameter, given in step.inputs.items():
        if parameter in _ONLY_COMPARED:
            continue
        for name in _names(given):
            found = by_name.get(name)
            if found is not None and found.function.kind.__name__ in _CARRY_ROWS:
                yield found


def _gives_prompts(step: WiredStep) -> bool:
    return step.function.kind.__name__ == "Prompts"


def _names(given: str | list[str]) -> list[str]:
    return given if isinstance(given, list) else [given]
