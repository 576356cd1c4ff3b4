"""PREFECT: `flows/catalog.py:NAME` is the compiled flow of pipeline NAME, with a typed form made from its `params:`.

The module has no flows written in it: a name is looked up in pipelines.yaml when somebody asks for it (PEP 562), so the
three spellings `flows/catalog.py:NAME`, `flows.catalog:NAME` and `flows.catalog.NAME` all load, and a worker sees the
file as it is when the run starts. $DRAFTSMITH_PIPELINES names another file than the project's own.
"""

from __future__ import annotations

from typing import Any

from prefect.runtime import flow_run

from components.contract import UserError
from flows.orchestration.flow import catalog_flow, refused_flow
from flows.planning.plan import RunOptions
from flows.planning.step_signature import named_packages
from flows.spec.schema import load_spec, pipeline_of, pipelines_file


def __getattr__(name: str) -> Any:
    """The flow of pipeline `name`; made once in a process."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        declared = pipeline_of(load_spec(pipelines_file()), name)
    except UserError as error:
        if flow_run.id:  # a worker's run, whose state then has the line, which a flow that is missing would not say
            return refused_flow(name, str(error))
        raise AttributeError(str(error)) from error
    options = RunOptions(file=pipelines_file(), packages=named_packages())
    flow = globals()[name] = catalog_flow(name, declared, options)
    return flow
