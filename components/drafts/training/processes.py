"""Several training processes for one drafter: PyTorch's elastic agent (torchrun) starts them and watches over them.

Each runs `train_from_features` (worker.py) with its rank. When one dies, the agents end the others and start all
again; they go on from the last checkpoint, MOST_RESTARTS times. The step holds a store of PyTorch's, at which the
agents meet: the processes read there what to do, and the first one leaves there what it reports, the facts about the
drafter that it has saved, or a fault of the input, which ends all of them without a restart. An interrupt of the step
becomes an entry which the first one looks for after every optimiser step: all save at the same one and end.

On several nodes the store listens where RENDEZVOUS says, and every other node runs an agent of its own (node.py).
"""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import psutil
import torch
from torch.distributed import DistNetworkError, TCPStore

from components.contract import Artifact, Context, Draft, Features, Target, UserError
from components.drafts.settings import Settings
from components.drafts.training.batches import DataChoice
from components.drafts.training.interrupts import Interrupted, held_back
from components.drafts.training.loop import Schedule
from components.outside_json import JsonObject

MOST_RESTARTS: Final = 3
RENDEZVOUS: Final = "DRAFTSMITH_RENDEZVOUS"
"""The environment variable with HOST:PORT of the node that runs the step, the same on every node."""
JOB, EVENTS, RESULT, REFUSAL, STOP = (f"draftsmith/{name}" for name in ("job", "events", "result", "refusal", "stop"))
"""Entries of the store: a Job, events one by one, the facts about the drafter, the message of a UserError, nothing."""
END: Final = "end"
WAIT_FOR_NODES: Final = timedelta(minutes=30)


@dataclass(frozen=True)
class Job:
    """What agents and processes are told, as JSON: the arguments of `train_from_features` and what is theirs."""

    run: str  # another one in every start of the step
    target: JsonObject
    features: JsonObject
    start_from: JsonObject | None
    method: str
    settings: JsonObject  # the method's
    schedule: JsonObject
    choice: JsonObject
    context: JsonObject
    num_threads: int  # of each process

    @property
    def on_gpu(self) -> bool:
        device: str = self.context["device"]
        return device.startswith("cuda")


def train_in_processes(
    target: Target,
    features: Features,
    start_from: Draft | None,
    method: str,
    settings: Settings,
    schedule: Schedule,
    choice: DataChoice,
    ctx: Context,
) -> Draft:
    """Train a drafter in `schedule.processes` processes of every node; on GPUs each has one of its own."""
    number = schedule.processes
    if ctx.device.startswith("cuda") and torch.cuda.device_count() < number:
        raise UserError(
            f"train_draft: processes: {number} need a GPU each and there are {torch.cuda.device_count()}; set processes"
        )
    job = Job(
        run=uuid.uuid4().hex,
        target=_handle(target),
        features=_handle(features),
        start_from=None if start_from is None else _handle(start_from),
        method=method,
        settings=settings.model_dump(mode="json"),
        schedule=asdict(schedule),
        choice=asdict(choice),
        context={
            "key": ctx.key,
            "out": str(ctx.out.absolute()),
            "scratch": str(ctx.scratch.absolute()),
            "device": ctx.device,
            "seed": ctx.seed,
        },
        num_threads=max(1, ctx.num_threads // number),
    )
    host, store = _open_store(schedule.nodes, ctx)
    endpoint = f"{host}:{store.port}"
    with held_back(lambda: store.set(STOP, "")):
        store.set(JOB, json.dumps(asdict(job)))
        with _events(endpoint, ctx):
            code = run_agent(job, endpoint, host)
        if store.check([STOP]):
            raise Interrupted("interrupted: the training processes have ended, at their last checkpoint")
        if store.check([REFUSAL]):
            raise UserError(store.get(REFUSAL).decode())
        if code != 0:
            raise RuntimeError(
                f"train_draft: the training processes ended with code {code}, after {MOST_RESTARTS} restarts or"
                f" {WAIT_FOR_NODES} without all of nodes: {schedule.nodes}; the log of the step has their errors"
            )
        return Draft.of_step(ctx, json.loads(store.get(RESULT)))


def rendezvous(needed_by: str) -> tuple[str, int]:
    """Host and port of RENDEZVOUS; raises UserError where it does not say them."""
    host, _, port = os.environ.get(RENDEZVOUS, "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"{needed_by}: set {RENDEZVOUS}=HOST:PORT on every node, the name of the one that runs the step and a port"
            " that is free there"
        )
    return host, int(port)


def connect(endpoint: str) -> TCPStore:
    """The store of a step, for another process."""
    host, _, port = endpoint.rpartition(":")
    return TCPStore(host, int(port), is_master=False)


def run_agent(job: Job, endpoint: str, address: str) -> int:
    """Run torchrun to its end; returns its exit code. address: this node's, for the others."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(job.schedule["nodes"])),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", job.run, "--local-addr", address),
        *("--rdzv-conf", f"is_host=0,join_timeout={WAIT_FOR_NODES.seconds}"),
        *("--nproc-per-node", str(job.schedule["processes"]), "--max-restarts", str(MOST_RESTARTS)),
        *("-m", "components.drafts.training.worker", endpoint),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.num_threads), "PYTHONPATH": os.pathsep.join(sys.path)}
    # A store of its own for each start: in a shared one gloo finds the addresses of processes that are gone.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # By default gloo takes the interface of the host's name, which may not even resolve.
    own = socket.gethostbyname(address)
    for name, addresses in psutil.net_if_addrs().items():
        if own in {each.address for each in addresses}:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
    # In a session of its own: the agent ends all at once when a signal to this process's group reaches it.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _open_store(nodes: int, ctx: Context) -> tuple[str, TCPStore]:
    """Host and store at which the agents of a step meet: on one node open to it alone, else where RENDEZVOUS says."""
    if nodes == 1:
        return "127.0.0.1", _store_of("127.0.0.1", socket.create_server(("127.0.0.1", 0)))
    host, port = rendezvous(f"train_draft: nodes: {nodes}")
    waits = False
    while True:
        try:
            return host, _store_of(host, socket.create_server(("", port)))
        except DistNetworkError as error:
            raise UserError(f"{RENDEZVOUS}: {host} is not the name of the node that runs the step") from error
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(f"{RENDEZVOUS}: no process may listen on port {port} here: {error.strerror}") from error
        if not waits:
            ctx.note(f"waits for port {port} of {RENDEZVOUS}: the nodes train another drafter")
        waits = True
        time.sleep(1)


def _store_of(host: str, listener: socket.socket) -> TCPStore:
    port, wait = listener.getsockname()[1], timedelta(minutes=1)
    return TCPStore(host, port, None, True, wait, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def _events(endpoint: str, ctx: Context) -> Iterator[None]:
    """Send on what the first process reports while it lasts."""
    own, readers = connect(endpoint), connect(endpoint)  # waiting keeps a connection busy
    readers.set_timeout(timedelta(days=1000))

    def forward() -> None:
        while (event := json.loads(readers.queue_pop(EVENTS))) != END:
            if ctx.send is not None:
                ctx.send(event)

    reader = threading.Thread(target=forward, name="events of the training processes")
    reader.start()
    try:
        yield
    finally:
        own.queue_push(EVENTS, json.dumps(END))
        reader.join()


def _handle(artifact: Artifact) -> JsonObject:
    return {"key": artifact.key, "path": str(artifact.path.absolute()), "info": dict(artifact.info)}
