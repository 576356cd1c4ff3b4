"""Checks of single words of pipelines.yaml: inserts, `if:`, `matrix:`, references, schedules, triggers, cycles."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flows.inserts import NAME, inserts_in
from flows.params import ParamSpec, value_error
from flows.problems import did_you_mean, show
from flows.sources import is_outside, reference_error

if TYPE_CHECKING:
    from flows.spec import StepSpec, TriggerSpec

Place = tuple[str | int, ...]
# What else stands in a run's form (flows/catalog.py), and words that Prefect drops from every flow.
FORM_WORDS = ("from_step", "to_step", "force", "dry_run", "return_state", "wait_for", "self", "cls")
CONDITION = re.compile(r"^(?:not\s+)?(?:machine\.cuda|params\.([A-Za-z_][A-Za-z0-9_]*))$")


def step_problems(
    name: str, step: StepSpec, params: Mapping[str, ParamSpec], steps: Mapping[str, Any]
) -> Iterator[tuple[Place, str]]:
    """(place inside the step, what is wrong) for everything that can be seen without the step's function."""
    yield from _matrix_problems(step)
    for part, value in (("with", step.settings), ("in", step.inputs)):
        for place, inside in inserts_in(value):
            if what := _insert_error(inside, params, step.matrix if part == "with" else None):
                yield (part, *place), what
    for parameter, value in step.inputs.items():
        for reference in value if isinstance(value, list) else [value]:
            if what := _reference_error(reference, name, steps):
                yield ("in", parameter), what
    if step.condition is not None:
        match = CONDITION.match(step.condition.strip())
        if not match:
            yield ("if",), f"'if' knows machine.cuda, params.NAME and not ..., not {show(step.condition)}"
        elif match.group(1) and match.group(1) not in params:
            yield ("if",), f"unknown parameter '{match.group(1)}'{did_you_mean(match.group(1), params)}"
        elif match.group(1) and params[match.group(1)].type != "bool":
            yield ("if",), f"'if' wants a parameter of type bool; '{match.group(1)}' is {params[match.group(1)].type}"


def _matrix_problems(step: StepSpec) -> Iterator[tuple[Place, str]]:
    for axis, values in step.matrix.items():
        if not isinstance(values, list) or not values:
            yield ("matrix", axis), f"matrix '{axis}' must be a list of values, not {show(values)}"
        elif not all(isinstance(value, str | int | float) for value in values):
            yield ("matrix", axis), f"matrix '{axis}': each value must be a word, a number, true or false"
        elif len({str(value) for value in values}) < len(values):
            yield ("matrix", axis), f"matrix '{axis}' names a value twice"
        elif any(re.search(r"[\[\],/\\\x00-\x1f\x7f]|^\.*$|.{101}", str(value)) for value in values):
            yield (
                ("matrix", axis),
                f"matrix '{axis}': no brackets, commas, slashes or control characters in a value, "
                "and at most 100 characters, since it names the step",
            )


def _insert_error(inside: str, params: Mapping[str, ParamSpec], matrix: Mapping[str, Any] | None) -> str:
    match = NAME.match(inside)
    if match and match.group(1) == "matrix" and matrix is None:
        return f"${{{inside}}}: a matrix value cannot choose an input; inputs fan out along the matrix by themselves"
    if not match:
        return f"${{{inside}}}: only ${{params.NAME}} and ${{matrix.NAME}} can be inserted"
    scope, word = match.groups()
    declared: Mapping[str, Any] = params if scope == "params" else (matrix or {})
    if word in declared:
        return ""
    what = "parameter" if scope == "params" else "matrix axis"
    return f"${{{inside}}}: unknown {what} '{word}'{did_you_mean(word, declared)}"


def _reference_error(reference: Any, step: str, steps: Mapping[str, Any]) -> str:
    if not isinstance(reference, str):
        return f"an input must be the name of a step or a list of them, not {show(reference)}"
    if "${" in reference:
        return ""  # known only when parameters are; looked at in wiring.py
    if is_outside(reference):
        return reference_error(reference)
    base = reference.split("[")[0]
    if base == step:
        return f"a step cannot be its own input ({show(reference)})"
    if base not in steps:
        others = [name for name in steps if name != step]
        return f"unknown step {show(reference)}{did_you_mean(base, others)}"
    return ""


def param_name_error(name: str) -> str:
    """Why a parameter cannot have this name, or ''."""
    if name in FORM_WORDS:
        return "every run has a field of that name already, choose another"
    return "Python keeps this word for itself, choose another" if keyword.iskeyword(name) else ""


def value_problems(params: Mapping[str, ParamSpec], values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(parameter, what is wrong) for the values that a schedule or a trigger gives."""
    for name, value in values.items():
        if name not in params:
            yield name, f"unknown parameter '{name}'{did_you_mean(name, params)}"
        elif fault := value_error(params[name], value):
            yield name, f"parameter '{name}' {fault}"


def trigger_problems(pipeline: str, trigger: TriggerSpec, pipelines: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key of the trigger, what is wrong)."""
    starts = [word for word in ("after", "file", "registry") if getattr(trigger, word) is not None]
    if len(starts) != 1:
        yield "", f"give exactly one of after, file, registry, not {' and '.join(starts) or 'none of them'}"
        return
    if trigger.after is not None and trigger.after == pipeline:
        yield "after", "a pipeline cannot start after itself"
    elif trigger.after is not None and trigger.after not in pipelines:
        yield "after", f"no pipeline '{trigger.after}'{did_you_mean(trigger.after, pipelines)}"
    if trigger.file is not None and not trigger.file.strip():
        yield "file", "'file' names no file"
    if trigger.registry is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", trigger.registry):
        yield "registry", f"{show(trigger.registry)} is not the name of a registered model"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", trigger.alias):
        yield "alias", f"{show(trigger.alias)} is not an alias such as champion"
    elif trigger.registry is None and "alias" in trigger.model_fields_set:
        yield "alias", "'alias' belongs to a registry trigger"


def schedule_problems(cron: str, timezone: str) -> Iterator[tuple[str, str]]:
    """("cron" or "timezone", what is wrong)."""
    from cronsim import CronSim, CronSimError

    fields = cron.upper().split()
    try:
        # Prefect takes neither the last working day (LW) nor a last Friday as 5L, and of six fields the seconds last
        if len(fields) != 5 or "LW" in fields[2] or re.search(r"\dL", fields[4]):
            raise CronSimError
        next(CronSim(cron, datetime(2024, 1, 1, tzinfo=UTC)))
    except (CronSimError, StopIteration):
        yield "cron", f"{show(cron)} is not a cron line of five fields (minute hour day month weekday) that ever comes"
    import zoneinfo

    try:
        if timezone.startswith(("posix", "right/")):  # other forms of the same files, which Prefect does not take
            raise ValueError(timezone)
        zoneinfo.ZoneInfo(timezone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        suggestion = did_you_mean(timezone, zoneinfo.available_timezones())
        yield "timezone", f"unknown timezone {show(timezone)}{suggestion}"


def cycle_of(graph: Mapping[str, list[str]]) -> list[str]:
    """The names along one cycle, first one repeated at the end; [] when there is none."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack = [(start, iter(graph.get(start, [])))]
        path.append(start)
        while stack:
            followers = stack[-1][1]
            follower = next((name for name in followers if name in graph and name not in done), None)
            if follower is None:
                stack.pop()
                done.add(path.pop())
            elif follower in path:
                circle = path[path.index(follower) :]
                return [circle[0], *reversed(circle[1:]), circle[0]]
            else:
                path.append(follower)
                stack.append((follower, iter(graph[follower])))
        done.add(start)
    return []
