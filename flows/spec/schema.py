"""The schema of pipelines.yaml, checked before anything is imported or run.

Every problem is found in one pass and told as `pipelines.yaml:LINE: what is wrong (did you mean 'x'?)`. Single
words are looked at too: inserts, `if:`, `matrix:`, references, schedules, triggers, cycles. Whether steps fit their
functions is the next question, answered in flows/planning/wiring.py.
"""

from __future__ import annotations

import keyword
import os
import re
import zoneinfo
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Final, Literal

from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from components.contract import UserError
from components.outside_json import JsonObject
from components.text import did_you_mean
from flows.spec.diagnostics import PAGE_OF_PLACEMENT, Problems, show
from flows.spec.params import ParamSpec, declaration_error, value_error
from flows.spec.placement import RunsOn, WrongPlace, parse_pipeline_placement, parse_step_placement
from flows.spec.references import NAME, Values, flat, inserts_in, is_outside, reference_error
from flows.spec.yaml_source import Lines, Place, read_yaml

LONGEST_NAME = 60
"""Of a pipeline, step or parameter: names of files, of Prefect's flows and of MLflow's runs are made of them."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=False)


class ScheduleSpec(_Strict):
    """When a pipeline runs by itself. slug: its name; cron: five fields; params: values other than the defaults."""

    slug: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    cron: str
    timezone: str = "UTC"
    params: JsonObject = {}


class TriggerSpec(_Strict):
    """What else starts a pipeline: exactly one of `after`, `file`, `registry`; params: values other than the defaults.

    after:    another pipeline of this file; it fires when a whole run of that one has completed.
    file:     a path or a glob pattern; it fires when a matching file is new or has changed.
    registry: a registered model; it fires when its `alias` is moved, by whom ever.
    """

    after: str | None = None
    file: str | None = None
    registry: str | None = None
    alias: str = "champion"
    params: JsonObject = {}


class ApprovalSpec(_Strict):
    """A person must say yes in Prefect's UI before `champion` moves; silence for `within_minutes` is a no."""

    within_minutes: float = Field(default=720.0, gt=0, le=44_640)


class RetrySpec(_Strict):
    """What happens to a run whose gate refused a measurement that other work on the machine disturbed (`when: noisy`).

    It is measured again every_minutes later, and again, until a time of day ("06:00") of the night that it began in.
    """

    when: Literal["noisy"] = "noisy"
    until: str = Field(pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    timezone: str = "UTC"
    every_minutes: float = Field(default=45.0, gt=0, le=1440)


class RetentionSpec(_Strict):
    """What `draftsmith gc` keeps of a home, and the pipelines (`after:`) after each run of which it runs by itself.

    keep_runs: newest runs of each pipeline of which all is kept. keep_versions: newest versions of each model that are
    kept besides those with an alias. features: features of those runs may go too, once drafters are trained on them.
    """

    keep_runs: int = Field(default=10, ge=1)
    keep_versions: int = Field(default=5, ge=0)
    features: bool = False
    after: list[str] = []

    @field_validator("after", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """`after: nightly` is `after: [nightly]`."""
        return [value] if isinstance(value, str) else value


Telling = Literal["failed", "refused", "promoted", "waiting", "drift"]


class NotifySpec(_Strict):
    """Who hears of the runs of a pipeline: a notification block of Prefect, named as TYPE/NAME ("slack-webhook/ops").

    on: what is told: a run that failed (or died), a release that the gate refused or made champion, one that waits for
    a person's yes, traffic that has drifted. verdict_within_days: also told is when the gate has judged nothing for so
    long; None: nobody waits for it.
    """

    on: list[Telling] = Field(default=["failed", "refused", "promoted", "drift"], min_length=1)
    to: str = Field(pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")
    verdict_within_days: float | None = Field(default=None, ge=0.0002, le=366)


class StepSpec(_Strict):
    """One step: which function, fed by what, with which settings."""

    uses: str
    inputs: JsonObject = Field(default={}, alias="in")
    settings: JsonObject = Field(default={}, alias="with")
    condition: str | None = Field(default=None, alias="if")
    matrix: JsonObject = {}
    retries: int = Field(default=0, ge=0, le=20)
    timeout_minutes: float | None = Field(default=None, gt=0)
    runs_on: Any = None

    def input_steps(self) -> list[str]:
        """The steps, and the references to the outside, that its inputs name, each once in their order."""
        return list(dict.fromkeys(name.split("[")[0] for name in flat(self.inputs)))


class PipelineSpec(_Strict):
    """One pipeline.

    overlap:  what a second run does while one goes on: wait, or skip (end as cancelled); None: they run side by side.
    approval: `true`, or {within_minutes: N}; None: the promotion gate decides alone.
    retry:    what a disturbed measurement leads to; None: nothing, the next schedule comes anyway.
    notify:   who hears how its runs ended; None: nobody.
    runs_on:  the Prefect work pool that takes its runs, and their GPUs; None: the one of `draftsmith up`.
    online:   its steps read from hubs and upload to them, where the operator allows it (flows/execution/hubs.py).
    trust_remote_code: models whose own Python code may run when they come from elsewhere (registry:, store:, path:).
    """

    about: str = ""
    params: dict[str, ParamSpec] = {}
    schedules: list[ScheduleSpec] = []
    triggers: list[TriggerSpec] = []
    overlap: Literal["wait", "skip"] | None = None
    approval: ApprovalSpec | None = None
    retry: RetrySpec | None = None
    notify: NotifySpec | None = None
    runs_on: Any = None
    online: bool = False
    trust_remote_code: list[str] = []
    steps: dict[str, StepSpec] = Field(min_length=1)

    @field_validator("approval", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        """`approval: true` is an approval with its defaults."""
        return {True: {}, False: None}[value] if isinstance(value, bool) else value


class _File(_Strict):
    pipelines: dict[str, PipelineSpec] = Field(min_length=1)
    retention: RetentionSpec | None = None


@dataclass(frozen=True)
class Spec:
    """A checked pipelines.yaml. name: the file name in messages. retention: None where the file says nothing of it."""

    file: Path
    pipelines: dict[str, PipelineSpec]
    lines: Lines
    retention: RetentionSpec | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return self.file.name


SHIPPED: Final = Path(__file__).resolve().parents[1] / "pipelines.yaml"
"""The project's pipelines.yaml: in a clone a link to the one at its root, in a wheel the file itself."""


def pipelines_file() -> Path:
    """The file that Prefect's processes read: $DRAFTSMITH_PIPELINES, else the project's."""
    return Path(os.environ.get("DRAFTSMITH_PIPELINES") or SHIPPED)


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
            line, what = _describe_fault(fault, lines)
            problems.add(line, what)
        problems.stop()
        raise
    for name, pipeline in parsed.pipelines.items():
        _check_pipeline(name, pipeline, lines, problems)
        _check_starts(name, parsed.pipelines, lines, problems)
    for index, name in enumerate(parsed.retention.after if parsed.retention is not None else ()):
        if name not in parsed.pipelines:
            line = lines.at("retention", "after", index)
            problems.add(line, f"retention: no pipeline '{name}'{did_you_mean(name, parsed.pipelines)}")
    problems.stop()
    return Spec(file=file, pipelines=parsed.pipelines, lines=lines, retention=parsed.retention)


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
    for param, declared in pipeline.params.items():
        line = lines.at(*place, "params", param)
        _check_name(param, r"[a-z][a-z0-9_]*", "parameter", line, problems)
        if fault := param_name_error(param):
            problems.add(line, f"parameter name '{param}': {fault}")
        if fault := declaration_error(declared):
            problems.add(line, f"parameter '{param}': {fault}")
    _check_place(parse_pipeline_placement, pipeline.runs_on, (*place, "runs_on"), "", lines, problems)
    graph: dict[str, list[str]] = {}
    for step, declared_step in pipeline.steps.items():
        at: Place = (*place, "steps", step)
        _check_name(step, r"[a-z][a-z0-9_]*", "step", lines.at(*at), problems)
        _check_place(parse_step_placement, declared_step.runs_on, (*at, "runs_on"), f"step '{step}': ", lines, problems)
        for inner, what in step_problems(step, declared_step, pipeline.params, pipeline.steps):
            problems.add(lines.at(*place, "steps", step, *inner), f"step '{step}': {what}", cause=(name, what))
        graph[step] = declared_step.input_steps()
    circle = cycle_of(graph)
    if circle:
        problems.add(lines.at(*place, "steps", circle[0], "in"), f"steps wait for each other: {' -> '.join(circle)}")


def _check_place(
    read: Callable[[Any], RunsOn], value: Any, place: Place, what: str, lines: Lines, problems: Problems
) -> None:
    """`runs_on:` of a pipeline or a step."""
    try:
        read(value)
    except WrongPlace as error:
        problems.add(lines.at(*place, *error.place), f"{what}{error}", page=PAGE_OF_PLACEMENT)


def _check_starts(name: str, pipelines: dict[str, PipelineSpec], lines: Lines, problems: Problems) -> None:
    """What starts a pipeline by itself: schedules and triggers."""
    place, pipeline = ("pipelines", name), pipelines[name]
    if pipeline.retry is not None and (fault := timezone_problem(pipeline.retry.timezone)):
        problems.add(lines.at(*place, "retry", "timezone"), f"pipeline '{name}': {fault}")
    slugs: set[str] = set()
    for index, schedule in enumerate(pipeline.schedules):
        at: Place = (*place, "schedules", index)
        for part, fault in schedule_problems(schedule.cron, schedule.timezone):
            problems.add(lines.at(*at, part), f"schedule '{schedule.slug}': {fault}")
        if schedule.slug in slugs:
            problems.add(lines.at(*at, "slug"), f"schedule '{schedule.slug}' is given twice")
        slugs.add(schedule.slug)
        for param, fault in value_problems(pipeline.params, schedule.params):
            problems.add(lines.at(*at, "params", param), f"schedule '{schedule.slug}': {fault}")
    for index, trigger in enumerate(pipeline.triggers):
        at = (*place, "triggers", index)
        for part, fault in trigger_problems(name, trigger, pipelines):
            problems.add(lines.at(*at, part), f"trigger number {index + 1}: {fault}")
        for param, fault in value_problems(pipeline.params, trigger.params):
            problems.add(lines.at(*at, "params", param), f"trigger number {index + 1}: {fault}")
    circle = cycle_of(
        {other: [t.after for t in spec.triggers if t.after and t.after != other] for other, spec in pipelines.items()}
    )
    if circle and circle[0] == name:
        line = lines.at(*place, "triggers")
        problems.add(line, f"pipelines would start each other for ever: {' -> '.join(reversed(circle))}")


def _check_name(name: str, pattern: str, what: str, line: int, problems: Problems) -> None:
    if not re.fullmatch(pattern, name):
        extra = " or -" if "_-" in pattern else ""
        problems.add(line, f"{what} name '{name}': use a-z, 0-9, _{extra}, and begin with a letter")
    elif len(name) > LONGEST_NAME:
        problems.add(line, f"{what} name '{name[:20]}...' has {len(name)} letters: use at most {LONGEST_NAME}")


def _model_at(place: tuple[str | int, ...]) -> type[BaseModel]:
    """Which model the mapping at this place must fit: pipelines/NAME/steps/NAME is a StepSpec."""
    if place[:1] == ("retention",):
        return RetentionSpec
    if len(place) >= 4:
        inner: dict[str, type[BaseModel]] = {
            "params": ParamSpec,
            "schedules": ScheduleSpec,
            "triggers": TriggerSpec,
            "steps": StepSpec,
        }
        return inner.get(str(place[2]), PipelineSpec)
    if len(place) == 3 and place[2] == "approval":
        return ApprovalSpec
    if len(place) == 3 and place[2] == "retry":
        return RetrySpec
    if len(place) == 3 and place[2] == "notify":
        return NotifySpec
    return PipelineSpec if len(place) >= 2 else _File


def _describe_fault(fault: Any, lines: Lines) -> tuple[int, str]:
    """A pydantic fault in our words, with its line."""
    place = tuple(fault["loc"])
    name, around = str(next(part for part in reversed(place) if isinstance(part, str))), place[:-1]
    line = lines.at(*place)
    prefix = _location_prefix(place)
    kind, context, value = fault["type"], fault.get("ctx", {}), fault["input"]
    if kind == "extra_forbidden":
        model = _model_at(around)
        known_keys = [field.alias or key for key, field in model.model_fields.items()]
        return line, f"{prefix}unknown key '{name}'{did_you_mean(name, known_keys, 0)}"
    if kind == "missing":
        return lines.at(*around), f"{_location_prefix((*around, ''))}'{name}' is missing"
    if kind == "too_short":
        return line, f"{prefix}'{name}' is empty"
    expected = _EXPECTED.get(kind)
    if place[2:] == ("approval",):
        expected = "true, false or {within_minutes: N}"
    if kind == "literal_error":
        choices = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        words = ", ".join(choices)
        return line, f"{prefix}'{name}' must be one of {words}, not {show(value)}{did_you_mean(value, choices, 0)}"
    if kind == "string_pattern_mismatch":
        expected = {
            "until": 'a time of day such as "06:00"',
            "to": "a block as TYPE/NAME, such as slack-webhook/ops",
        }.get(name, "a-z, 0-9 and - only")
    for bound, words in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if bound in context:
            expected = f"{words} {context[bound]:g}"
    return line, f"{prefix}'{name}' must be {expected or fault['msg']}, not {show(value)}"


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _location_prefix(place: tuple[str | int, ...]) -> str:
    """A prefix that names the step, parameter or pipeline around the last key: "step 'draft': "."""
    kinds = {"steps": "step", "params": "parameter", "schedules": "schedule", "triggers": "trigger"}
    if place[0] == "retention":
        return "retention: "
    if len(place) >= 5 and place[2] in kinds:
        what = place[3] if isinstance(place[3], str) else f"number {place[3] + 1}"
        return f"{kinds[str(place[2])]} {show(what) if isinstance(place[3], str) else what}: "
    if len(place) >= 3:
        return f"pipeline '{place[1]}': "
    return ""


# What else stands in a run's form (flows/orchestration/compiled_flow.py), and words that Prefect drops from every flow.
FORM_WORDS = ("from_step", "to_step", "force", "trial", "dry_run", "return_state", "wait_for", "self", "cls")
CONDITION = re.compile(r"^(?:not\s+)?(?:machine\.cuda|params\.([A-Za-z_][A-Za-z0-9_]*))$")


def step_problems(
    name: str, step: StepSpec, params: Mapping[str, ParamSpec], steps: Mapping[str, object]
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


def _insert_error(inside: str, params: Mapping[str, ParamSpec], matrix: Values | None) -> str:
    match = NAME.match(inside)
    if match and match.group(1) == "matrix" and matrix is None:
        return f"${{{inside}}}: a matrix value cannot choose an input; inputs fan out along the matrix by themselves"
    if not match:
        return f"${{{inside}}}: only ${{params.NAME}} and ${{matrix.NAME}} can be inserted"
    scope, word = match.groups()
    declared: Mapping[str, object] = params if scope == "params" else (matrix or {})
    if word in declared:
        return ""
    what = "parameter" if scope == "params" else "matrix axis"
    return f"${{{inside}}}: unknown {what} '{word}'{did_you_mean(word, declared)}"


def _reference_error(reference: Any, step: str, steps: Mapping[str, object]) -> str:
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


def value_problems(params: Mapping[str, ParamSpec], values: Values) -> Iterator[tuple[str, str]]:
    """(parameter, what is wrong) for the values that a schedule or a trigger gives."""
    for name, value in values.items():
        if name not in params:
            yield name, f"unknown parameter '{name}'{did_you_mean(name, params)}"
        elif fault := value_error(params[name], value):
            yield name, f"parameter '{name}' {fault}"


def trigger_problems(pipeline: str, trigger: TriggerSpec, pipelines: Mapping[str, object]) -> Iterator[tuple[str, str]]:
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
    fields = cron.upper().split()
    try:
        # Prefect takes neither the last working day (LW) nor a last Friday as 5L, and of six fields the seconds last
        if len(fields) != 5 or "LW" in fields[2] or re.search(r"\dL", fields[4]):
            raise CronSimError
        next(CronSim(cron, datetime(2024, 1, 1, tzinfo=UTC)))
    except (CronSimError, StopIteration):
        yield "cron", f"{show(cron)} is not a cron line of five fields (minute hour day month weekday) that ever comes"
    if fault := timezone_problem(timezone):
        yield "timezone", fault


def timezone_problem(timezone: str) -> str:
    """What is wrong with the name of a timezone, or ''."""
    try:
        if timezone.startswith(("posix", "right/")):  # other forms of the same files, which Prefect does not take
            raise ValueError(timezone)
        zoneinfo.ZoneInfo(timezone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return f"unknown timezone {show(timezone)}{did_you_mean(timezone, zoneinfo.available_timezones())}"
    return ""


def cycle_of(graph: Mapping[str, list[str]]) -> list[str]:
    """The names along one cycle, first one repeated at the end; [] when there is none."""
    try:
        TopologicalSorter(
            {name: [other for other in names if other in graph] for name, names in graph.items()}
        ).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []
