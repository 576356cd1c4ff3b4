"""The process of one step: the engine starts it from a warm fork server, a guard watches it, a worker runs the step.

    engine --(fork server)--> guard --fork--> worker --> whatever the step starts

The fork server has imported the heavy libraries once; each step is a fork of it, so its start is cheap and its memory
is returned. The engine's own process never imports them.

The guard is a few lines around `poll`: it holds a leash to the engine (a pipe that closes when the engine dies, however
it dies) and adopts every orphan below it. Leash gone, deadline, cancel or simply the end of the step: it kills all that
is left of the tree. The worker runs the step and talks to the engine in JSON lines only; nothing is unpickled from it.

A step may run code that came with a model, or a package of somebody else's, so the worker first takes the secrets that
the step has no use for from its environment. Passwords of our own servers and the secret of a shared store no step has;
keys of hubs and object stores are there for the steps that fetch and send, and for those whose settings name them
(`api_key_variable`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NoReturn

import psutil

from components.contract import KINDS, Artifact, Context, Machine, NothingNew, ReportProgress, UserError
from components.files import locked
from components.outside_json import JsonObject
from components.source_code import allow_code
from components.text import message_of
from flows.execution.messages import ArtifactHandle, ClusterOrder, Event, OnJson, StepOrder, disk_fault
from flows.planning.step_signature import resolve
from flows.planning.this_machine import place_for_sockets
from flows.services.child import PR_SET_CHILD_SUBREAPER, end_with, prctl
from storage.redaction import holds_password, is_secret_name, without_secrets

PRELOAD = ("flows.execution.preload",)
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Threads that spin long at barriers stand still when cores are shared: beside other work 2 threads took 12 times as
    # long as 1. A short spin keeps what a second thread gains on a quiet machine (1.7 times) and gives up early else.
    "GOMP_SPINCOUNT": "3000",
}
GRACE_SECONDS = 5.0  # for processes to be gone, once they cannot refuse
STEP_SECONDS = 20.0  # between the polite signal and that one: a step may finish something, as training its checkpoint
SOCKET_NAME_BYTES = 33  # of "/pymp-xxxxxxxx/listener-xxxxxxxx", which multiprocessing adds
_start_lock = threading.Lock()


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended: "made", "nothing_new", "user_error" or "failed" (also: timed out, killed).

    peak_rss_mib: the most that it, or a process that it started and saw end, had in memory.
    """

    how: str
    message: str = ""
    kind: str = ""
    info: JsonObject = field(default_factory=dict)
    peak_rss_mib: float = 0.0


def run_child(
    order: StepOrder,
    *,
    on_event: OnJson,
    timeout_s: float | None = None,
    preload: tuple[str, ...] = PRELOAD,
) -> ChildEnd:
    """Run one step in a child and return how it ended; whatever happens here, the child's whole tree is gone after."""
    process, connection = _start(guard, json.dumps(order), f"step {order['key'][:12]}", preload)
    deadline = time.monotonic() + timeout_s if timeout_s is not None else None
    end: ChildEnd | None = None
    try:
        while end is None:
            remaining = 1.0 if deadline is None else min(1.0, deadline - time.monotonic())
            if remaining <= 0:
                return ChildEnd("failed", f"stopped after {timeout_s or 0:g} s, its timeout_minutes")
            ready = wait([connection, process.sentinel], timeout=remaining)
            end = _read(connection, on_event)
            if end is None and process.sentinel in ready:
                end = _read(connection, on_event) or ChildEnd("failed", _death(process))
        process.join(2 * GRACE_SECONDS)
        return end
    finally:
        _stop(process)
        connection.close()
        process.close()


def ask_child(function: str, question: JsonObject, timeout_s: float, preload: tuple[str, ...]) -> JsonObject:
    """The answer of a function of ours, "module:name", that needs the libraries of the steps; {} where it has none."""
    process, connection = _start(answer, json.dumps([function, question]), function, preload)
    try:
        return dict(json.loads(connection.recv_bytes())) if connection.poll(timeout_s) else {}
    except EOFError:  # it was killed
        return {}
    finally:
        _stop(process)
        connection.close()
        process.close()


def answer(connection: Connection, question_text: str, environment: dict[str, str]) -> None:
    """Entry point of the child that answers one question; {"fault": ...} says why there is no answer."""
    os.environ.clear()
    os.environ.update(environment)
    function, question = json.loads(question_text)
    module, _, name = function.partition(":")
    try:
        answered = getattr(importlib.import_module(module), name)(question)
    except Exception as error:  # no run fails for want of an answer
        answered = {"fault": message_of(error)}
    connection.send_bytes(json.dumps(answered).encode())


def _start(
    entry: Callable[[Connection, str, dict[str, str]], object], order_text: str, name: str, preload: tuple[str, ...]
) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    with _start_lock, _nameless_main(), _environment():
        _keep_sockets_short()
        process = context.Process(target=entry, args=(sender, order_text, dict(os.environ)), name=name)
        context.set_forkserver_preload(list(preload))
        forkserver.ensure_running()
        process.start()
    sender.close()
    return process, receiver


def _read(connection: Connection, on_event: OnJson) -> ChildEnd | None:
    """Pass on the events that have arrived; the message that says how it ended, if that is among them."""
    try:
        while connection.poll():
            message = json.loads(connection.recv_bytes())
            if "end" not in message:
                on_event(message)
                continue
            if message["end"] == "made":
                return ChildEnd("made", "", message["kind"], message["info"], message["peak_rss_mib"])
            what = str(message["message"])
            if message["end"] == "failed":
                what = f"{message['type']}: {what}" if what else str(message["type"])
            return ChildEnd(message["end"], what)
    except EOFError:
        time.sleep(0.02)  # the writer is gone; the sentinel tells how
    return None


def _death(process: BaseProcess) -> str:
    process.join(1.0)
    code = process.exitcode
    if code is not None and code > 128:
        hint = " (out of memory?)" if code == 128 + 9 else ""
        return f"its process was killed by signal {code - 128}{hint}"
    return f"its process ended with exit code {code} and said nothing"


def _stop(process: BaseProcess) -> None:
    """End the child's tree: ask the guard, which passes it on; one that does not answer dies, its worker with it."""
    if process.is_alive():
        process.terminate()
        process.join(STEP_SECONDS + 2 * GRACE_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def _nameless_main() -> Iterator[None]:
    """A child would import the program that started it (a command line, a test runner) once more; it has no need to."""
    main = sys.modules["__main__"]
    saved = {name: vars(main)[name] for name in ("__spec__", "__file__") if name in vars(main)}
    try:
        for name in saved:
            setattr(main, name, None)
        yield
    finally:
        for name, value in saved.items():
            setattr(main, name, value)


@contextmanager
def _environment() -> Iterator[None]:
    """Set our default environment variables, unless the user has, for the fork server and its children."""
    added = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _keep_sockets_short() -> None:
    """Give multiprocessing a folder for its sockets, where the one it would make for itself has too long a path.

    It asks for one once in a process, under a name of its own, and has no setting for it. The temporary folder of the
    whole process is no way: other threads ask for that too.
    """
    place = place_for_sockets(107 - SOCKET_NAME_BYTES)
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None and place != tempfile.gettempdir():
        config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=place)
        util.Finalize(None, shutil.rmtree, args=(config["tempdir"], True), exitpriority=-100)


def guard(connection: Connection, order_text: str, environment: dict[str, str]) -> None:
    """Entry point of the child: start the worker, wait for its end or the engine's, then leave no process behind.

    environment: the engine's, as it is now; the fork server has the one in which it was started.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()  # a Ctrl-C in the terminal is the engine's to handle, which ends us in order
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop_requests: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: stop_requests.append(time.monotonic()))
    guard_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        _run_worker(connection, json.loads(order_text), guard_pid)
    connection.close()
    status = _watch(worker, stop_requests)
    _kill_tree()
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    os._exit(code if code >= 0 else 128 - code)


def _watch(worker: int, stop_requests: list[float]) -> int | None:
    """Wait until the worker has ended (its wait status), or until everything must end (None)."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "the guard is started by the engine"
    leash = int(parent.sentinel)
    poll = select.poll()
    poll.register(leash, select.POLLIN | select.POLLHUP)
    with contextlib.suppress(AttributeError, OSError):  # no pidfd here: the time-out below finds the end
        poll.register(os.pidfd_open(worker), select.POLLIN)
    signalled = False
    while True:
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            return status
        if stop_requests:
            if not signalled:
                signalled = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker, signal.SIGTERM)
            elif time.monotonic() - stop_requests[0] > STEP_SECONDS:
                return None
        if any(descriptor == leash for descriptor, _ in poll.poll(100 if stop_requests else 500)):
            return None  # the engine is gone


def _kill_tree() -> None:
    """Kill every process below this one; as the sub-reaper it also finds those that hid in a new session."""
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        below = psutil.Process().children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _run_worker(connection: Connection, order: StepOrder, guard_pid: int) -> NoReturn:
    """The worker: set the process up, run the step, report, leave. Never returns."""
    code, send = 70, _sender(connection)
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        if not end_with(guard_pid, signal.SIGKILL):
            os._exit(code)
        _redirect_output(Path(order["log"]))
        _set_threads(int(order["num_threads"]))
        forget_secrets(order["address"], order["settings"])
        allow_code(order["remote_code"])
        with locked(Path(order["lock"])):  # a worker of the same key may still be dying: its engine was killed
            code = _run_step(order, send)
    except BaseException as error:  # the last resort: it must reach the run and the log, and a fork must never return
        text = without_secrets(traceback.format_exc())
        message = disk_fault(error, Path(order["out"])) or str(error)
        with contextlib.suppress(OSError):  # the run may be gone, as on a full disk the log may
            send({"end": "failed", "type": type(error).__name__, "message": message, "traceback": text})
            print(text, file=sys.stderr, flush=True)  # noqa: T201 (stderr is the step's log)
    finally:
        with contextlib.suppress(Exception):
            # Clean up after libraries (tqdm's lock), else Python reports a leaked semaphore when the run ends. Failures
            # there are printed, so this comes before the log is flushed.
            multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_step(order: StepOrder, send: OnJson) -> int:
    """Run the step and send its end: {"end": "made" | "nothing_new" | "user_error" | "failed", ...}; the exit code."""
    try:
        step = resolve(order["address"], tuple(order["packages"]))
        arguments: JsonObject = {
            slot: list(map(_read_artifact, handles)) if isinstance(handles, list) else _read_artifact(handles)
            for slot, handles in order["inputs"].items()
        }
        arguments.update(step.arguments(order["settings"]))
        context = Context(
            key=order["key"],
            out=Path(order["out"]),
            scratch=Path(order["scratch"]),
            device=order["device"],
            seed=int(order["seed"]),
            num_threads=int(order["num_threads"]),
            send=send,
            rehearsed=order["rehearsed"],
        )
        if order["cluster"] is not None:
            context.mapper = partial(_map_on_cluster, order["cluster"], context.scratch)
        if step.wants_ctx:
            arguments["ctx"] = context
        if step.measures:
            arguments["machine"] = Machine(**order["machine"])
        artifact = step.function(**arguments)
        assert isinstance(artifact, step.kind), (
            f"{step.address} returned {type(artifact).__name__}, not {step.kind.__name__}"
        )
        assert artifact.path == context.out, f"{step.address} must return {step.kind.__name__}.of_step(ctx, ...)"
        # Of its largest process: a measurement holds target and drafters in processes of their own.
        both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        peak = max(resource.getrusage(whose).ru_maxrss for whose in both) / 1024
        send({"end": "made", "kind": step.kind.__name__, "info": dict(artifact.info), "peak_rss_mib": round(peak, 1)})
        return 0
    except NothingNew as nothing:
        send({"end": "nothing_new", "message": str(nothing)})
        return 0
    except UserError as error:
        send({"end": "user_error", "message": str(error)})
        return 2
    except Exception as error:
        text = without_secrets(traceback.format_exc())
        print(text, file=sys.stderr, flush=True)  # noqa: T201 (stderr is the step's log)
        message = disk_fault(error, Path(order["out"])) or str(error)
        send({"end": "failed", "type": type(error).__name__, "message": message, "traceback": text})
        return 1


def _map_on_cluster(
    order: ClusterOrder, scratch: Path, function: Callable[[Any, ReportProgress], Any], shards: Sequence[Any]
) -> Iterator[Any]:
    """What stands behind `ctx.map` of a step on a cluster."""
    if not shards:
        return
    os.environ.update(order["environment"])
    # Prefect takes its address and password from the environment at the moment it is imported.
    from flows.execution.clusters import map_on_cluster

    yield from map_on_cluster(order, scratch, function, shards)


def _sender(connection: Connection) -> OnJson:
    """A function that sends one JSON message; safe to call from threads of the step."""
    lock = threading.Lock()

    def send(message: Event) -> None:
        data = json.dumps(dict(message)).encode()
        with lock:
            connection.send_bytes(data)

    return send


def _read_artifact(item: ArtifactHandle) -> Artifact:
    return KINDS[item["kind"]](key=item["key"], path=Path(item["path"]), info=item["info"])


def _redirect_output(log: Path) -> None:
    """Send what libraries print to the step's log, not into the progress display."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def _set_threads(count: int) -> None:
    """Pin the number of threads, for libraries still to be loaded and for torch when the fork server has loaded it."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(count)
    loaded = sys.modules.get("torch")
    if loaded is not None:
        loaded.set_num_threads(count)


OF_OUR_SERVERS: Final = ("PREFECT_", "MLFLOW_", "DRAFTSMITH_")
"""How the variables begin that hold the passwords and addresses of what `draftsmith up` serves."""
ROOMS_WITHOUT_KEYS: Final = ("drafts", "decoding", "bench", "speedup", "report")
"""No step in these rooms fetches or sends anything."""


def forget_secrets(address: str, settings: JsonObject) -> None:
    """Take from this process's environment the secrets that the step at this address has no use for."""
    named = {str(value) for name, value in settings.items() if name.endswith("_variable") and value}
    for name in secret_names(os.environ) - named:
        if name.startswith(OF_OUR_SERVERS) or address.partition(".")[0] in ROOMS_WITHOUT_KEYS:
            del os.environ[name]


def secret_names(environment: Mapping[str, str]) -> set[str]:
    """The variables that hold a secret: by their names, or because a password stands in the address they hold."""
    return {name for name, value in environment.items() if is_secret_name(name) or holds_password(value)}
