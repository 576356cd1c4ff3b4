"""What pipelines.yaml may say: the whole vocabulary, checked before anything is imported or run.

Every problem is found in one pass and told as `pipelines.yaml:LINE: what is wrong (did you mean 'x'?)`. Whether steps
fit their functions is the next question, answered in wiring.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.contract import UserError
from flows.params import ParamSpec, declaration_error, value_error
from flows.problems import Problems, did_you_mean, show
from flows.spec_checks import cycle_of, schedule_problems, step_problems
from flows.yaml_lines import Lines, Place, read_yaml

NOT_YET = ("triggers", "overlap", "approval", "runs_on")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)


class ScheduleSpec(_Strict):
    """When a pipeline runs by itself. slug: its name; cron: five fields; params: values other than the defaults."""

    slug: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    cron: str
    timezone: str = "UTC"
    params: dict[str, Any] = {}


class StepSpec(_Strict):
    """One step: which function, fed by what, with which settings."""

    uses: str
    inputs: dict[str, Any] = Field(default={}, alias="in")
    settings: dict[str, Any] = Field(default={}, alias="with")
    condition: str | None = Field(default=None, alias="if")
    matrix: dict[str, Any] = {}
    retries: int = Field(default=0, ge=0, le=20)
    timeout_minutes: float | None = Field(default=None, gt=0)
    runs_on: Any = None


class PipelineSpec(_Strict):
    """One pipeline. triggers, overlap, approval and runs_on are words of the vocabulary that are refused for now."""

    about: str = ""
    params: dict[str, ParamSpec] = {}
    schedules: list[ScheduleSpec] = []
    triggers: Any = None
    overlap: Any = None
    approval: Any = None
    runs_on: Any = None
    steps: dict[str, StepSpec] = Field(min_length=1)


class _File(_Strict):
    pipelines: dict[str, PipelineSpec] = Field(min_length=1)


@dataclass(frozen=True)
class Spec:
    """A pipelines.yaml that says nothing wrong by itself. name: how its lines are quoted."""

    file: Path
    pipelines: dict[str, PipelineSpec]
    lines: Lines

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.name


def load_spec(file: Path) -> Spec:
    """Read and check a pipelines file.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    content, lines = read_yaml(file)
    problems = Problems(file.name)
    try:
        parsed = _File.model_validate(content)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            line, what = _say(fault, lines)
            problems.add(line, what)
        problems.stop()
        raise
    for name, pipeline in parsed.pipelines.items():
        _check_pipeline(name, pipeline, lines, problems)
    problems.stop()
    return Spec(file=file, pipelines=parsed.pipelines, lines=lines)


def pipeline_of(spec: Spec, name: str) -> PipelineSpec:
    """The pipeline of this name.

    Raises:
        UserError: there is none.
    """
    if name not in spec.pipelines:
        raise UserError(f"{spec.name}: no pipeline '{name}'{did_you_mean(name, spec.pipelines)}")
    return spec.pipelines[name]


def _check_pipeline(name: str, pipeline: PipelineSpec, lines: Lines, problems: Problems) -> None:
    place = ("pipelines", name)
    _check_name(name, r"[a-z][a-z0-9_-]*", "pipeline", lines.at(*place), problems)
    for word in NOT_YET:
        if word in pipeline.model_fields_set:
            problems.add(lines.at(*place, word), f"'{word}' is not available yet: leave it out")
    for param, declared in pipeline.params.items():
        line = lines.at(*place, "params", param)
        _check_name(param, r"[a-z][a-z0-9_]*", "parameter", line, problems)
        if why := declaration_error(declared):
            problems.add(line, f"parameter '{param}': {why}")
    slugs: set[str] = set()
    for index, schedule in enumerate(pipeline.schedules):
        at: Place = (*place, "schedules", index)
        for part, why in schedule_problems(schedule.cron, schedule.timezone):
            problems.add(lines.at(*at, part), f"schedule '{schedule.slug}': {why}")
        if schedule.slug in slugs:
            problems.add(lines.at(*at, "slug"), f"schedule '{schedule.slug}' is given twice")
        slugs.add(schedule.slug)
        for param, value in schedule.params.items():
            line = lines.at(*at, "params", param)
            if param not in pipeline.params:
                problems.add(
                    line,
                    f"schedule '{schedule.slug}': unknown parameter '{param}'{did_you_mean(param, pipeline.params)}",
                )
            elif why := value_error(pipeline.params[param], value):
                problems.add(line, f"schedule '{schedule.slug}': parameter '{param}' {why}")
    graph: dict[str, list[str]] = {}
    for step, declared_step in pipeline.steps.items():
        at = (*place, "steps", step)
        _check_name(step, r"[a-z][a-z0-9_]*", "step", lines.at(*at), problems)
        if "runs_on" in declared_step.model_fields_set:
            problems.add(lines.at(*at, "runs_on"), f"step '{step}': 'runs_on' is not available yet: leave it out")
        for inner, what in step_problems(step, declared_step, pipeline.params, pipeline.steps):
            problems.add(lines.at(*place, "steps", step, *inner), f"step '{step}': {what}")
        graph[step] = [
            str(reference).split("[")[0]
            for value in declared_step.inputs.values()
            for reference in (value if isinstance(value, list) else [value])
        ]
    circle = cycle_of(graph)
    if circle:
        problems.add(lines.at(*place, "steps", circle[0], "in"), f"steps wait for each other: {' -> '.join(circle)}")


def _check_name(name: str, pattern: str, what: str, line: int, problems: Problems) -> None:
    if not re.fullmatch(pattern, name):
        extra = " or -" if "_-" in pattern else ""
        problems.add(line, f"{what} name '{name}': use a-z, 0-9, _{extra}, and begin with a letter")


def _model_at(place: tuple[str | int, ...]) -> type[BaseModel]:
    """Which model the mapping at this place must fit: pipelines/NAME/steps/NAME is a StepSpec."""
    if len(place) >= 4:
        inner: dict[str, type[BaseModel]] = {"params": ParamSpec, "schedules": ScheduleSpec, "steps": StepSpec}
        return inner.get(str(place[2]), PipelineSpec)
    return PipelineSpec if len(place) >= 2 else _File


def _say(fault: Any, lines: Lines) -> tuple[int, str]:
    """A pydantic fault in our words, with its line."""
    place = tuple(fault["loc"])
    name, around = str(place[-1]), place[:-1]
    line = lines.at(*place)
    where = _where(place)
    kind, context, given = fault["type"], fault.get("ctx", {}), fault["input"]
    if kind == "extra_forbidden":
        model = _model_at(around)
        known = [field.alias or key for key, field in model.model_fields.items()]
        said = did_you_mean(name, known)
        return line, f"{where}unknown key '{name}'{said if 'did you mean' in said else ''}"
    if kind == "missing":
        return lines.at(*around), f"{_where((*around, ''))}'{name}' is missing"
    if kind == "too_short":
        return line, f"{where}'{name}' is empty"
    wanted = _WANTED.get(kind)
    if kind == "literal_error":
        choices = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        said = did_you_mean(given, choices)
        wanted = f"one of {', '.join(choices)}"
        return line, f"{where}'{name}' must be {wanted}, not {show(given)}{said if 'did you mean' in said else ''}"
    if kind == "string_pattern_mismatch":
        wanted = "a-z, 0-9 and - only"
    for bound, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if bound in context:
            wanted = f"{words} {context[bound]:g}"
    return line, f"{where}'{name}' must be {wanted or fault['msg']}, not {show(given)}"


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _where(place: tuple[str | int, ...]) -> str:
    """Which thing around the last key is meant: "step 'draft': "."""
    kinds = {"steps": "step", "params": "parameter", "schedules": "schedule"}
    if len(place) >= 5 and place[2] in kinds:
        what = place[3] if isinstance(place[3], str) else f"number {place[3] + 1}"
        return f"{kinds[str(place[2])]} {show(what) if isinstance(place[3], str) else what}: "
    if len(place) >= 3:
        return f"pipeline '{place[1]}': "
    return ""
