"""PREFECT: `flows/catalog.py:NAME` is the compiled flow of pipeline NAME, with a typed form made from its `params:`.

The module has no flows written in it: a name is looked up in pipelines.yaml when somebody asks for it (PEP 562), so the
three spellings `flows/catalog.py:NAME`, `flows.catalog:NAME` and `flows.catalog.NAME` all load, and a worker sees the
file as it is when the run starts. $DRAFTSMITH_PIPELINES names another file than the project's own.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from flows.direct import RunOptions
from flows.params import ParamSpec
from flows.spec import PipelineSpec, load_spec

if TYPE_CHECKING:
    from prefect import Flow

ROOT = Path(__file__).resolve().parents[1]
FORM: dict[str, tuple[Any, Any, str]] = {
    "from_step": (str | None, None, "Start at this step; what stands before it must be in the store."),
    "to_step": (str | None, None, "Stop after this step."),
    "force": (list[str], [], "Steps to run again although nothing has changed."),
}
_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}


def pipelines_file() -> Path:
    """$DRAFTSMITH_PIPELINES, else pipelines.yaml of the project."""
    return Path(os.environ.get("DRAFTSMITH_PIPELINES") or ROOT / "pipelines.yaml")


def __getattr__(name: str) -> Any:
    """The flow of pipeline `name`; made once in a process."""
    if name.startswith("__"):
        raise AttributeError(name)
    spec = load_spec(pipelines_file())
    if name not in spec.pipelines:
        known = ", ".join(spec.pipelines)
        raise AttributeError(f"{pipelines_file()} has no pipeline '{name}' (known: {known})")
    from flows.run import catalog_flow

    made = globals()[name] = catalog_flow(name, RunOptions(file=pipelines_file()))
    return made


def compile_flow(pipeline: PipelineSpec, name: str, body: Callable[[Mapping[str, Any]], Any]) -> Flow[..., Any]:
    """A Prefect flow whose parameters are those of the pipeline, and whose body is `body`.

    Constraints travel in the annotations; descriptions reach Prefect's form through the docstring only.
    """
    from prefect import Flow

    def run(**given: Any) -> Any:
        return body(given)

    parameters = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=param.default, annotation=annotation_of(param))
        for key, param in pipeline.params.items()
    ]
    parameters += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for key, (annotation, default, _) in FORM.items()
    ]
    run.__name__ = run.__qualname__ = name
    run.__module__ = "flows.catalog"
    run.__doc__ = _docstring(pipeline)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return Flow(run, name=name, description=pipeline.about or None, version=version_of(pipeline), persist_result=False)


def annotation_of(param: ParamSpec) -> Any:
    """The type that stands for a parameter: Literal becomes a select, bounds are enforced by the form."""
    if param.choices is not None and param.type != "list":
        return Literal[tuple(param.choices)]
    if param.type == "list":
        items = Literal[tuple(param.choices)] if param.choices is not None else Any
        return Annotated[list[items], Field(min_length=_whole(param.min), max_length=_whole(param.max))]  # type: ignore[valid-type]
    plain = _TYPES[param.type]
    return Annotated[plain, Field(ge=param.min, le=param.max)] if param.type in ("int", "float") else plain


def version_of(pipeline: PipelineSpec) -> str:
    """A digest of what the pipeline says, so that the UI shows when it has changed."""
    text = json.dumps(pipeline.model_dump(mode="json", by_alias=True), sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _docstring(pipeline: PipelineSpec) -> str:
    args = {key: param.about for key, param in pipeline.params.items()} | {
        key: about for key, (_, _, about) in FORM.items()
    }
    lines = [f"    {key}: {' '.join(about.split()) or key}" for key, about in args.items()]
    return "\n".join([pipeline.about or "A pipeline.", "", "Args:", *lines, ""])


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
