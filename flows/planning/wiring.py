"""Checks that the steps of a pipeline fit together: matrices expanded, inputs matched to slots by kind.

A `matrix` makes one step per combination, named `draft[eagle3]`. A later step whose parameter takes one artifact fans
out along the same axes (`acceptance[eagle3]`), zipping inputs that share an axis; a parameter that takes a list takes
them all. A step that `if:` switches off also skips the steps that require it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from components.contract import UserError
from components.outside_json import JsonObject
from components.pipeline_checks import CHECKS
from components.text import did_you_mean, shorten
from flows.planning.step_signature import PACKAGES, Slot, StepFunction, resolve
from flows.spec.diagnostics import PAGE, PAGE_OF_CHECK, PAGE_OF_PLACEMENT, Problems, page_of_step
from flows.spec.params import tidy
from flows.spec.placement import HERE, RunsOn, misplaced, parse_step_placement
from flows.spec.references import (
    Values,
    fill,
    flat,
    is_outside,
    params_at,
    params_in,
    reference_error,
    source_misfit,
    source_name,
    text_of,
)
from flows.spec.schema import PipelineSpec, Spec, StepSpec, pipeline_of

Outside = Callable[[str], str]  # the name of an outside input (flows/spec/references.py) -> its kind
MOST_COMBINATIONS = 1_000  # of one step; a sweep of every method, depth and data type has under a hundred
Axis = tuple[str, str]  # (step that has the matrix, name of the axis)
Coords = dict[Axis, Any]

__all__ = ["PACKAGES", "WiredStep", "Wiring", "check_spec", "wire"]


@dataclass(frozen=True)
class WiredStep:
    """One step, expanded: its function, settings resolved, inputs by name. coords: where it stands in the matrices."""

    name: str
    base: str
    line: int
    coords: Coords
    function: StepFunction
    settings: JsonObject
    inputs: dict[str, str | list[str]]
    retries: int = 0
    timeout_minutes: float | None = None
    runs_on: RunsOn = HERE

    @property
    def address(self) -> str:
        """The address of its function."""
        return self.function.address

    @property
    def kind(self) -> str:
        """The kind of artifact it makes."""
        return self.function.kind.__name__

    def input_names(self) -> list[str]:
        """All names in `inputs`, flat."""
        return flat(self.inputs)

    def registry_names(self) -> frozenset[str]:
        """Every text in the settings: each may be a name in a registry of the code."""
        return frozenset(_texts(self.settings))


@dataclass(frozen=True)
class Wiring:
    """Expanded steps in an order in which they can run, and those that `if:` leaves out, with the reason."""

    steps: tuple[WiredStep, ...]
    skipped: tuple[tuple[str, str], ...]


def wire(
    spec: Spec,
    pipeline: str,
    params: Values,
    *,
    device: str = "cpu",
    outside: Outside,
    packages: tuple[str, ...] = PACKAGES,
    everything: bool = False,
) -> Wiring:
    """Expand and match the steps of one pipeline. `everything`: as if every `if:` were true.

    Raises:
        UserError: a line for each piece that does not fit.
    """
    problems = Problems(spec.name)
    wiring = _Wirer(spec, pipeline, params, device, outside, packages, everything, problems).run()
    problems.stop()
    return wiring


def check_spec(spec: Spec, *, outside: Outside, packages: tuple[str, ...] = PACKAGES) -> dict[str, Wiring]:
    """Wire every pipeline with its default parameters and report the problems of all together."""
    problems = Problems(spec.name)
    wired = {}
    for name, pipeline in spec.pipelines.items():
        params = {param: tidy(declared, declared.default) for param, declared in pipeline.params.items()}
        wired[name] = _Wirer(spec, name, params, "cpu", outside, packages, True, problems).run()
    problems.stop()
    return wired


class _Wirer:
    """Goes through the steps of one pipeline in order, noting problems and going on where it can."""

    def __init__(
        self,
        spec: Spec,
        name: str,
        params: Values,
        device: str,
        outside: Outside,
        packages: tuple[str, ...],
        everything: bool,
        problems: Problems,
    ) -> None:
        self.pipeline: PipelineSpec = pipeline_of(spec, name)
        self.place = ("pipelines", name, "steps")
        self.lines, self.params, self.device, self.outside = spec.lines, params, device, outside
        self.packages, self.everything, self.problems = packages, everything, problems
        self.steps_by_base: dict[
            str, list[WiredStep]
        ] = {}  # base -> its expanded steps; absent when it could not be wired
        self.kinds: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.reported: set[str] = set()  # faults of outside inputs, each reported once

    def run(self) -> Wiring:
        order = _ordered(self.pipeline.steps)
        for base in order:
            self._wire_step(base, self.pipeline.steps[base])
        steps = tuple(step for base in order for step in self.steps_by_base.get(base, []))
        for check in CHECKS:
            for fault in check(steps):
                self._note(fault.base, fault.message, *fault.place, page=PAGE_OF_CHECK[check.__name__])
        return Wiring(steps, tuple(self.skipped.items()))

    def _note(self, base: str, message: str, *place: str | int, cause: str = "", page: str = PAGE) -> None:
        """cause: the parameter that brings the fault, which is told once however many steps take that parameter."""
        line = self.lines.at(*self.place, base, *place)
        told_once = (*self.place, cause) if cause else None
        self.problems.add(line, f"step '{base}': {message}", cause=told_once, page=page)

    def _wire_step(self, base: str, step: StepSpec) -> None:
        try:
            function = resolve(step.uses, self.packages)
        except UserError as error:
            self._note(base, shorten(error), "uses")
            return
        self.kinds[base] = function.kind.__name__
        if reason := misplaced(parse_step_placement(step.runs_on), function.function, function.measures):
            self._note(base, reason, "runs_on", page=PAGE_OF_PLACEMENT)
        inputs = self._matched_inputs(base, step, function)
        if not self.everything and step.condition is not None and not self._condition_holds(step.condition):
            self.skipped[base] = f"if: {step.condition}"
            return
        lost = next(self._missing_inputs(inputs or {}, function), None)
        if lost is not None:
            self.skipped[base] = f"it needs '{lost}', which is left out"
            return
        if self._fans_out_too_far(base, step, function, inputs or {}):
            return
        expanded = list(
            self._expand(base, step, function, inputs or {})
        )  # finds wrong settings even when inputs are wrong
        if inputs is not None:
            self.steps_by_base[base] = expanded

    def _condition_holds(self, condition: str) -> bool:
        *negated, word = condition.split()
        value = self.device.startswith("cuda") if word == "machine.cuda" else self.params[word.removeprefix("params.")]
        return bool(value) != bool(negated)

    def _matched_inputs(self, base: str, step: StepSpec, function: StepFunction) -> dict[str, list[str]] | None:
        """parameter -> references, each of the right kind; None when something does not fit."""
        fits = True
        for parameter in step.inputs:
            if parameter not in function.slots:
                suggestion = did_you_mean(parameter, function.slots)
                hint = ": it is a setting, give it under 'with'" if parameter in function.setting_names else suggestion
                self._note(base, f"{function.address} takes no input '{parameter}'{hint}", "in", parameter)
                fits = False
        matched: dict[str, list[str]] = {}
        for parameter, slot in function.slots.items():
            if parameter not in step.inputs:
                if not slot.optional:
                    self._note(base, f"the input '{parameter}' ({slot}) is missing: give it under 'in'")
                    fits = False
                continue
            value = fill(step.inputs[parameter], {"params": self.params})
            references = value if isinstance(value, list) else [value]
            if isinstance(value, list) and not slot.many:
                self._note(base, f"'{parameter}' takes one {slot.kind.__name__}, not a list", "in", parameter)
                fits = False
            for reference in references:
                if reason := self._misfit(parameter, slot, str(reference)):
                    if reason not in self.reported:  # a whole pipeline may name one champion that is not there
                        inserted = params_in(step.inputs[parameter])
                        self._note(base, reason, "in", parameter, cause=f"{inserted[0]}: {reason}" if inserted else "")
                    if is_outside(str(reference)):
                        self.reported.add(reason)
                    fits = False
                elif str(reference).split("[")[0] in self.pipeline.steps and reference.split("[")[0] not in self.kinds:
                    fits = False  # its own problem is already noted
            matched[parameter] = [
                source_name(str(name), slot.kind) if is_outside(str(name)) else str(name) for name in references
            ]
        return matched if fits else None

    def _misfit(self, parameter: str, slot: Slot, reference: str) -> str:
        if is_outside(reference):
            if reason := reference_error(reference):
                return reason
            if reason := source_misfit(reference, slot.kind):
                return f"'{parameter}' {reason}"
            try:
                kind = self.outside(source_name(reference, slot.kind))
            except UserError as error:
                return shorten(error)
            base = reference
        else:
            base = reference.split("[")[0]
            if base not in self.pipeline.steps:
                return f"unknown step '{reference}'{did_you_mean(base, self.pipeline.steps)}"
            names = [step.name for step in self.steps_by_base.get(base, [])]
            if reference != base and names and reference not in names:
                return f"unknown step '{reference}'{did_you_mean(reference, names)}"
            kind = self.kinds.get(base, slot.kind.__name__)
        if kind != slot.kind.__name__:
            return f"'{parameter}' wants {slot.kind.__name__}, but '{base}' makes {kind}"
        return ""

    def _missing_inputs(self, inputs: Mapping[str, list[str]], function: StepFunction) -> Iterator[str]:
        """References to skipped steps that are required."""
        for parameter, references in inputs.items():
            skipped = [name for name in references if name.split("[")[0] in self.skipped]
            slot = function.slots[parameter]
            if skipped and not slot.optional and (not slot.many or len(skipped) == len(references)):
                yield skipped[0]

    def _fans_out_too_far(
        self, base: str, step: StepSpec, function: StepFunction, inputs: Mapping[str, list[str]]
    ) -> bool:
        """Note a step that would become more steps than anybody means."""
        single = [names[0] for parameter, names in inputs.items() if not function.slots[parameter].many]
        sizes = [len(values) for values in step.matrix.values()] + [len(self._options(name)) or 1 for name in single]
        if (number := math.prod(sizes)) <= MOST_COMBINATIONS:
            return False
        what = f"its matrix and inputs have {number:,} combinations, and at most {MOST_COMBINATIONS:,} are worked on"
        self._note(base, what, "matrix")
        return True

    def _expand(
        self, base: str, step: StepSpec, function: StepFunction, inputs: Mapping[str, list[str]]
    ) -> Iterator[WiredStep]:
        """One step for each combination of the axes that come with its inputs and of its own matrix."""
        single = {
            parameter: self._options(names[0])
            for parameter, names in inputs.items()
            if not function.slots[parameter].many
        }
        many = {
            parameter: [name for reference in names for name, _ in self._options(reference)]
            for parameter, names in inputs.items()
            if function.slots[parameter].many
        }
        axes = [[((base, axis), value) for value in values] for axis, values in step.matrix.items()]
        reported: set[tuple[str, str]] = set()
        for joined_inputs, coords in _join_options(
            {parameter: options for parameter, options in single.items() if options}
        ):
            for matrix_coords in itertools.product(*axes):
                here: Coords = {**coords, **dict(matrix_coords)}
                name = f"{base}[{','.join(text_of(value) for value in here.values())}]" if here else base
                matrix = {axis: value for (owner, axis), value in here.items() if owner == base}
                filled = fill(step.settings, {"params": self.params, "matrix": matrix})
                settings, faults = function.settings(filled)
                for place, what in faults:
                    if (str(place), what) not in reported:
                        reported.add((str(place), what))
                        inserted = [] if what.startswith("unknown") else params_at(step.settings, place)
                        param = next(iter(inserted), "")
                        message = f"{what} (from the parameter '{param}')" if param else what
                        self._note(base, message, "with", *place, cause=param, page=page_of_step(step.uses))
                wired: dict[str, str | list[str]] = {
                    **joined_inputs,
                    **{key: list(names) for key, names in many.items() if names},
                }
                yield WiredStep(
                    name=name,
                    base=base,
                    line=self.lines.at(*self.place, base),
                    coords=here,
                    function=function,
                    settings=settings,
                    inputs={slot: wired[slot] for slot in function.slots if slot in wired},
                    retries=step.retries,
                    timeout_minutes=step.timeout_minutes,
                    runs_on=parse_step_placement(step.runs_on),
                )

    def _options(self, reference: str) -> list[tuple[str, Coords]]:
        """(name, coords) of everything that a reference stands for; a name with [..] stands for itself, fixed."""
        if is_outside(reference):
            return [(reference, {})]
        steps = self.steps_by_base.get(reference.split("[")[0], [])
        if "[" in reference:
            return [(step.name, {}) for step in steps if step.name == reference]
        return [(step.name, step.coords) for step in steps]


def _join_options(options: Mapping[str, list[tuple[str, Coords]]]) -> Iterator[tuple[dict[str, str], Coords]]:
    """Every choice of one option per parameter whose coordinates agree wherever they share an axis."""
    for choice in itertools.product(*options.values()):
        coords: Coords = {}
        if all(
            coords.setdefault(axis, value) == value
            for _, option_coords in choice
            for axis, value in option_coords.items()
        ):
            yield {parameter: name for parameter, (name, _) in zip(options, choice, strict=True)}, coords


def _ordered(steps: Mapping[str, StepSpec]) -> list[str]:
    """Topological order; among those that could come next, the order of the file."""
    needs = {name: steps.keys() & step.input_steps() for name, step in steps.items()}
    order: list[str] = []
    while len(order) < len(steps):
        ready = [name for name in steps if name not in order and needs[name] <= set(order)]
        assert ready, "spec.py lets no cycle through"
        order.append(ready[0])
    return order


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
