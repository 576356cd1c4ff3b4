"""PREFECT: the shards of a wide step on a Dask or Ray cluster, each of them a Prefect task of the run it belongs to.

`map_on_cluster` stands behind `ctx.map` in a step's child process, which the engine has told what run it serves. It
starts a local cluster for as long as the step (its processes end with the step's tree) or joins one that is there, and
hands in the shards through Prefect's own task runners. A worker needs the same packages and sees the same
paths. What carries a call is the cluster's own transport; what lasts are the files that shards write.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import psutil
from prefect import Flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.results import ResultStore
from prefect.states import Failed
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from components.contract import ReportProgress, UserError
from components.source_code import allow_code
from components.text import shorten
from flows.execution.messages import ClusterOrder
from flows.planning.this_machine import place_for_sockets

PACKAGE_OF: Final = {"dask": "prefect_dask", "ray": "prefect_ray"}
DELIVERY_TIMEOUT_S: Final = 20.0
OBJECT_STORE_BYTES: Final = 128 << 20  # shards hand over paths and counts; Ray would take 30 % of the memory
MAX_RAY_PLACE: Final = 24  # Ray adds 80 characters, a socket's path holds 107
CONNECT_TIMEOUT: Final = "30s"
JOIN_ATTEMPTS: Final = 4
LOCAL_RAY: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what keeps Ray on loopback, on Linux too; else it listens everywhere
    "RAY_AUTH_MODE": "token",
    # Ray would run its workers at niceness 15, where they wait for whatever else the machine does.
    "RAY_worker_niceness": "0",
}
ASKS_FOR_TOKEN: Final = "; one that asks for a token wants RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here too"
_one_at_a_time = threading.Lock()  # a worker of somebody's cluster may have threads; torch has one number of threads


class ClusterFailed(RuntimeError):
    """A cluster did not come up, or lost a shard more often than it tries again. The files of other shards stay."""


def map_on_cluster(
    order: ClusterOrder, scratch: Path, function: Callable[[Any, ReportProgress], Any], shards: Sequence[Any]
) -> Iterator[Any]:
    """What `function` makes of each shard, in their order, for `ctx.map` in the child process of a wide step."""
    cluster = str(order["cluster"])
    with _cluster(order, scratch) as runner, _inside(order["flow_run_id"], runner), _gpus(order):
        futures = []
        for number, shard in enumerate(shards, start=1):
            as_task = task(
                run_shard,
                name=f"{order['step']} on {cluster}",
                task_run_name=f"{order['step']} {number} of {len(shards)}",
                cache_policy=NO_CACHE,
                persist_result=False,
                on_completion=[deliver],
                on_failure=[deliver],
            )
            arguments = {"function": function, "shard": shard, "remote_code": order["remote_code"]}
            futures.append(runner.submit(as_task, arguments))
        for number, future in enumerate(futures, start=1):
            try:
                yield future.result()
            except UserError:
                raise
            except Exception as error:  # of Dask, of Ray, or of the step itself
                message = f"{type(error).__name__}: {shorten(error, 200)}"
                raise ClusterFailed(f"shard {number} of {len(shards)} on {cluster}: {message}") from error


@contextmanager
def _gpus(order: ClusterOrder) -> Iterator[None]:
    """Ray runs each shard that is submitted within it where so many GPUs are free, and shows it these alone.

    Raises:
        UserError: no machine of the cluster has so many; Ray would wait for one without a word.
    """
    number = order["gpus_per_shard"]
    if number is None:
        yield
        return
    import ray
    from prefect_ray.context import remote_options

    most = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]), default=0.0)
    if most < number:
        raise UserError(
            f"step '{order['step']}': runs_on: gpus_per_shard: {number:g}, and no machine of the cluster has more than"
            f" {most:g} GPUs; set gpus_per_shard"
        )
    with remote_options(num_gpus=number):
        yield


def run_shard(function: Callable[[Any, ReportProgress], Any], shard: Any, remote_code: Sequence[str]) -> Any:
    """The body of a shard's task, in a worker. A wrong input ends as Failed with its one line, not as a traceback.

    remote_code: models whose own code may run; the worker may be one that others have started.
    """
    with _one_at_a_time:
        allow_code(remote_code)
        try:
            return function(shard, lambda share: None)
        except UserError as error:
            return Failed(message=str(error), data=error)


def deliver(task: Any, task_run: Any, state: Any) -> None:
    """Send what Prefect has queued in a worker before the shard counts as done: a worker may end without notice."""
    del task, task_run, state
    deliver_queued(at_exit=False)


def deliver_queued(*, at_exit: bool) -> None:
    """Deliver the logs and events in Prefect's queues. at_exit: nothing more comes after them."""
    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=DELIVERY_TIMEOUT_S, at_exit=at_exit)


@contextmanager
def _cluster(order: ClusterOrder, scratch: Path) -> Iterator[Any]:
    """A task runner whose cluster answers; one that was started here ends here."""
    start = {"dask": _dask, "ray": _ray}[order["cluster"]]
    location = order["address"] or "this machine"
    with ExitStack() as stack:
        try:
            runner = stack.enter_context(start(order, scratch))
        except Exception as error:
            hint = ASKS_FOR_TOKEN if order["cluster"] == "ray" and order["address"] else ""
            reason = str(error).strip()
            if "Traceback" in reason:  # Ray hands on its head's
                reason = reason.splitlines()[-1]
            message = f"no {order['cluster']} cluster on {location}: {shorten(reason, 200)}{hint}"
            raise ClusterFailed(message) from error
        yield runner


@contextmanager
def _dask(order: ClusterOrder, scratch: Path) -> Iterator[Any]:
    from prefect_dask import DaskTaskRunner

    if order["address"]:
        runner = DaskTaskRunner(address=order["address"], client_kwargs={"timeout": CONNECT_TIMEOUT})
    else:
        local = {
            "n_workers": order["workers"],
            "threads_per_worker": 1,
            "host": "127.0.0.1",
            "security": True,  # other users of this machine have no key to it: who may submit may run anything
            "dashboard_address": "127.0.0.1:0",  # any free port; its usual one is taken by a second step
            "memory_limit": 0,  # a worker is not ended for what a target weighs
            "local_directory": str(scratch / "dask"),
        }
        runner = DaskTaskRunner(cluster_kwargs=local)
    with runner:
        assert runner.client is not None  # made at the first use: now, so that its fault is told as the cluster's
        yield runner


@contextmanager
def _ray(order: ClusterOrder, scratch: Path) -> Iterator[Any]:
    del scratch  # its path is too long for Ray's sockets
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not order["address"]:
        os.environ.update(LOCAL_RAY, RAY_AUTH_TOKEN=secrets.token_hex(32))  # before Ray is imported
    from prefect_ray import RayTaskRunner

    if order["address"]:
        with ExitStack() as stack:
            yield _join_ray(RayTaskRunner, str(order["address"]), stack)
        return
    with _ray_folder() as folder:
        local = {
            "address": "local",  # whatever $RAY_ADDRESS says
            "num_cpus": order["workers"],
            "include_dashboard": False,
            "log_to_driver": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": folder,
        }
        with RayTaskRunner(init_kwargs=local) as runner:  # Ray gives its processes 30 s to come up
            yield runner


def _join_ray(runner: Callable[..., Any], address: str, stack: ExitStack) -> Any:
    """A task runner on a Ray cluster that is there. Its head forks a server for every client, and a fork that meets a
    call of gRPC dies (Ray 2.60: 1 of 12 on two busy cores); the next one has no reason to."""

    def join() -> Any:
        return stack.enter_context(runner(address=address, init_kwargs={"log_to_driver": False}))

    broken_off = retry_if_exception_type(ConnectionAbortedError)
    return Retrying(retry=broken_off, stop=stop_after_attempt(JOIN_ATTEMPTS), reraise=True)(join)


@contextmanager
def _ray_folder() -> Iterator[str]:
    """A place for Ray's sockets, whose paths may not be long; those of processes that were killed are removed."""
    place = place_for_sockets(MAX_RAY_PLACE)
    for leftover in Path(place).glob("draftsmith-ray-*"):
        pid = leftover.name.split("-")[2]
        if leftover.stat().st_uid == os.getuid() and pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"draftsmith-ray-{os.getpid()}-", dir=place)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _inside(flow_run_id: str, runner: Any) -> Iterator[None]:
    """Be inside a flow run that goes on in another process, so that tasks submitted here belong to it."""
    with get_client(sync_client=True) as client:
        context = FlowRunContext(
            flow=Flow(_nothing, name="draftsmith"),
            flow_run=client.read_flow_run(UUID(flow_run_id)),
            task_runner=runner,
            client=client,
            parameters={},
            result_store=ResultStore(),
            persist_result=False,
            detached=True,
        )
        with context:
            yield


def _nothing() -> None:
    """The body of the flow that stands for the real one in workers; it is never called."""
