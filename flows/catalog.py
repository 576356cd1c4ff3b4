"""PREFECT: `flows/catalog.py:NAME` is the compiled flow of pipeline NAME, with a typed form made from its `params:`.

The module has no flows written in it: a name is looked up in pipelines.yaml when somebody asks for it (PEP 562), so the
three spellings `flows/catalog.py:NAME`, `flows.catalog:NAME` and `flows.catalog.NAME` all load, and a worker sees the
file as it is when the run starts. $DRAFTSMITH_PIPELINES names another file than the project's own.
"""

from __future__ import annotations

from typing import Any

from prefect.runtime import flow_run

from components.contract import UserError
from flows.execution.local_run import record_unplanned
from flows.orchestration.flow import catalog_flow
from flows.planning.plan import RunOptions
from flows.planning.step_signature import named_packages
from flows.spec.schema import load_spec, pipelines_file
from storage.artifacts.store import Store


def __getattr__(name: str) -> Any:
    """The flow of pipeline `name`; made once in a process."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        spec = load_spec(pipelines_file())
    except UserError as error:
        if flow_run.id:  # a worker's run, which is lost before there is a flow that could say why
            reason = "; ".join(str(error).splitlines())
            record_unplanned(Store().home, name, {}, reason, how="prefect", flow_run_id=flow_run.id)
        raise
    if name not in spec.pipelines:
        names = ", ".join(spec.pipelines)
        raise AttributeError(f"{pipelines_file()} has no pipeline '{name}' (known: {names})")
    options = RunOptions(file=pipelines_file(), packages=named_packages())
    flow = globals()[name] = catalog_flow(name, spec.pipelines[name], options)
    return flow
