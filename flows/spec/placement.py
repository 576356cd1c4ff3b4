"""Where work runs: `runs_on:` of a pipeline names a work pool and GPUs, of a wide step a Dask or Ray cluster.

A wide step cuts its work into shards and hands them to `ctx.map`; that call in its code is what makes it wide, so
nothing has to be declared and nothing can be declared wrongly. Where a step runs never enters its key: the bytes are
the same. Errors come as (place inside `runs_on`, what is wrong), for the caller to put a line to.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from components.source_code import syntax_tree
from components.text import did_you_mean
from flows.spec.diagnostics import show

DEFAULT_WORKERS: Final = 2
MAX_WORKERS: Final = 256
MAX_GPUS: Final = 64  # of one node
_KEYS = ("cluster", "workers", "address", "gpus_per_shard")
_POOL_KEYS = ("pool", "gpus")
_ADDRESSES: Final = {
    "dask": (r"(tcp|tls|ucx|ws|wss)://[^\s/]+:\d+", "tcp://HOST:8786"),
    "ray": (r"ray://[^\s/]+:\d+", "ray://HOST:10001"),
}


@dataclass(frozen=True)
class RunsOn:
    """Where a pipeline or a step runs; all None is here, in this process's children.

    pool:    name of the Prefect work pool that a pipeline's deployment goes to; None: the one that all go to.
    gpus:    GPUs of one node that each run of a pipeline asks its pool for; 0: what the pool gives by itself.
    cluster: what carries the shards of a wide step.
    workers: processes of a local cluster that lives as long as the step; None with an address.
    address: a cluster that is already there, with its own workers.
    gpus_per_shard: GPUs that Ray sets aside for each shard while it is worked on; a fraction shares one.
    """

    pool: str | None = None
    gpus: int = 0
    cluster: Literal["dask", "ray"] | None = None
    workers: int | None = None
    address: str | None = None
    gpus_per_shard: float | None = None

    def __str__(self) -> str:
        if self.cluster is not None:
            return f"{self.cluster}, {self.address or f'{self.workers} workers here'}"
        pool = f"pool {self.pool}" if self.pool is not None else "here"
        return f"{pool}, {self.gpus} GPU{'' if self.gpus == 1 else 's'}" if self.gpus else pool


HERE: Final = RunsOn()


class WrongPlace(ValueError):
    """`runs_on:` says something that cannot be. place: keys inside it, for the line."""

    def __init__(self, message: str, *place: str) -> None:
        super().__init__(message)
        self.place = place


def parse_pipeline_placement(value: Any) -> RunsOn:
    """`runs_on:` of a pipeline: the name of a work pool, or {pool: NAME, gpus: N} with either left out; None is here.

    Raises:
        WrongPlace: it is anything else.
    """
    if value is None:
        return HERE
    if not isinstance(value, Mapping):
        return RunsOn(pool=_pool_name(value, "'runs_on'"))
    if "cluster" in value:
        raise WrongPlace("'runs_on' of a pipeline names a work pool; a cluster goes to a wide step")
    for key in value:
        if key not in _POOL_KEYS:
            raise WrongPlace(f"runs_on: unknown key {show(key)}{did_you_mean(str(key), _POOL_KEYS)}", str(key))
    if not value:
        raise WrongPlace("'runs_on' must be the name of a work pool, or like {gpus: 1}, not {}")
    gpus = value.get("gpus", 0)
    if type(gpus) is not int or not 0 <= gpus <= MAX_GPUS:
        raise WrongPlace(f"runs_on: 'gpus' must be 0 to {MAX_GPUS}, all of one node, not {show(gpus)}", "gpus")
    return RunsOn(pool=_pool_name(value["pool"], "runs_on: 'pool'", "pool") if "pool" in value else None, gpus=gpus)


def _pool_name(value: Any, label: str, *place: str) -> str:
    """The name of a work pool. Raises WrongPlace."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 _.-]{0,199}", value):
        raise WrongPlace(f"{label} must be the name of a work pool, not {show(value)}", *place)
    return value


def parse_step_placement(value: Any) -> RunsOn:
    """`runs_on:` of a step: {cluster: dask | ray, workers: N or address: WHERE, gpus_per_shard: N}; None is here.

    Raises:
        WrongPlace: it is anything else.
    """
    if value is None:
        return HERE
    if isinstance(value, str):
        raise WrongPlace("a work pool takes whole pipelines: give it to the pipeline, or {cluster: dask} to this step")
    if not isinstance(value, Mapping):
        raise WrongPlace(f"'runs_on' must be like {{cluster: dask, workers: 2}}, not {show(value)}")
    for key in value:
        if key not in _KEYS:
            raise WrongPlace(f"runs_on: unknown key {show(key)}{did_you_mean(str(key), _KEYS)}", str(key))
    cluster, workers, address, gpus = (value.get(key) for key in _KEYS)
    if cluster not in ("dask", "ray"):
        what = f", not {show(cluster)}" if cluster is not None else " (it is missing)"
        raise WrongPlace(f"runs_on: 'cluster' must be dask or ray{what}", "cluster")
    if gpus is not None:
        if cluster != "ray":
            raise WrongPlace("runs_on: only Ray sets GPUs aside for a shard: take cluster: ray", "gpus_per_shard")
        # Ray's own rule (its remote options): a part of one GPU, or whole ones.
        if type(gpus) not in (int, float) or not (0 < gpus < 1 or (gpus >= 1 and gpus == int(gpus))):
            message = f"runs_on: 'gpus_per_shard' must be a whole number or below 1, like 0.5, not {show(gpus)}"
            raise WrongPlace(message, "gpus_per_shard")
    if address is None:
        workers = DEFAULT_WORKERS if workers is None else workers
        if type(workers) is not int or not 1 <= workers <= MAX_WORKERS:
            raise WrongPlace(f"runs_on: 'workers' must be 1 to {MAX_WORKERS}, not {show(workers)}", "workers")
        return RunsOn(cluster=cluster, workers=workers, gpus_per_shard=gpus)
    if workers is not None:
        raise WrongPlace("runs_on: a cluster with an address has its own workers: leave 'workers' out", "workers")
    pattern, example = _ADDRESSES[cluster]
    if not isinstance(address, str) or not re.fullmatch(pattern, address):
        raise WrongPlace(f"runs_on: 'address' must be like {example}, not {show(address)}", "address")
    return RunsOn(cluster=cluster, address=address, gpus_per_shard=gpus)


def misplaced(runs_on: RunsOn, function: Callable[..., Any], measures: bool) -> str:
    """Why this step cannot run on that cluster, or ''. measures: it measures the machine that it runs on."""
    if runs_on.cluster is None:
        return ""
    if measures:
        return f"it measures this machine; on {runs_on.cluster} it would measure another: leave 'runs_on' out"
    if not is_wide(function):
        return f"it is one piece of work, nothing to spread over {runs_on.cluster}: leave 'runs_on' out"
    return ""


def is_wide(function: Callable[..., Any]) -> bool:
    """Whether the step, or the module that it imports its work from, hands shards to `ctx.map`: a cluster can carry
    those."""
    tree = syntax_tree(textwrap.dedent(inspect.getsource(function)))
    if _maps_shards(tree):
        return True
    for node in ast.walk(tree):
        spec = importlib.util.find_spec(node.module) if isinstance(node, ast.ImportFrom) and node.module else None
        if spec is not None and spec.origin is not None and _maps_shards(syntax_tree(Path(spec.origin).read_bytes())):
            return True
    return False


def _maps_shards(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "map"
        and isinstance(node.value, ast.Name)
        and node.value.id == "ctx"
        for node in ast.walk(tree)
    )
