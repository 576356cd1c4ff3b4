"""PREFECT: a pipeline as a Prefect flow, with a typed form made from its `params:`.

Constraints travel in the annotations; descriptions reach Prefect's form through the docstring only. Prefect's own
check of the values is off: the form and the server refuse a wrong one, and what reaches the flow all the same is
refused by flows/spec/params.py in one line, where Prefect would print a page.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from prefect import Flow
from pydantic import Field, WithJsonSchema

from components.outside_json import JsonObject
from flows.spec.params import ParamSpec
from flows.spec.references import Values
from flows.spec.schema import PipelineSpec

_TYPES: JsonObject = {"int": int, "float": float, "bool": bool, "str": str}


def compile_flow(pipeline: PipelineSpec, name: str, body: Callable[[Values], Any]) -> Flow[..., Any]:
    """A Prefect flow whose parameters are those of the pipeline, and whose body is `body`."""

    def run(**values: Any) -> Any:
        return body(values)

    fields = form_of(pipeline)
    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, (annotation, default, _) in fields.items()
    ]
    run.__name__ = run.__qualname__ = name
    run.__module__ = "flows.catalog"
    lines = [f"    {key}: {' '.join(about.split()) or key}" for key, (_, _, about) in fields.items()]
    run.__doc__ = "\n".join([pipeline.about or "A pipeline.", "", "Args:", *lines, ""])
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return Flow(
        run,
        name=name,
        description=pipeline.about or None,
        version=version_of(pipeline),
        persist_result=False,
        validate_parameters=False,
    )


def form_of(pipeline: PipelineSpec) -> dict[str, tuple[Any, Any, str]]:
    """The fields of a run's form: name -> (type, default, description). The pipeline's own come first."""
    steps = _one_of(list(pipeline.steps))
    return {
        **{key: (annotation_of(param), param.default, param.about) for key, param in pipeline.params.items()},
        "from_step": (steps | None, None, "Start at this step; what stands before it must be in the store."),
        "to_step": (steps | None, None, "Stop after this step."),
        "force": (list[steps], [], "Steps to run again although nothing has changed."),  # type: ignore[valid-type]
        "trial": (bool, False, "Keep the release of this run out of the registry."),
        "dry_run": (bool, False, "Show what would run, and why, and run nothing."),
    }


def annotation_of(param: ParamSpec) -> Any:
    """The type that stands for a parameter: Literal becomes a select, bounds are enforced by the form."""
    if param.choices is not None and param.type != "list":
        return _one_of(param.choices)
    if param.type == "list":
        items = _one_of(param.choices) if param.choices is not None else _items_of(param.default)
        return Annotated[list[items], Field(min_length=_whole(param.min), max_length=_whole(param.max))]  # type: ignore[valid-type]
    plain = _TYPES[param.type]
    if param.type == "int":  # so that a message says 50, not 50.0
        return Annotated[plain, Field(ge=_whole(param.min), le=_whole(param.max))]
    return Annotated[plain, Field(ge=param.min, le=param.max)] if param.type == "float" else plain


def version_of(pipeline: PipelineSpec) -> str:
    """A digest of what the pipeline says, so that the UI shows when it has changed."""
    text = json.dumps(pipeline.model_dump(mode="json", by_alias=True), sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _one_of(choices: Sequence[Any]) -> Any:
    """A select. pydantic writes a single choice as a constant, which Prefect's form does not know."""
    select: Any = Literal[tuple(choices)]
    return select if len(choices) > 1 else Annotated[select, WithJsonSchema({"enum": list(choices)})]


def _items_of(default: Sequence[Any]) -> Any:
    """The type of a list's items as its default shows it, so that the form has the right input for each."""
    types = {type(item) for item in default}
    return types.pop() if len(types) == 1 and types <= {str, int, float, bool} else Any


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
