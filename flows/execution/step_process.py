"""Starts the child process of a step from a warm fork server and supervises it until it ends.

The fork server has imported the heavy libraries once; each step is a fork of it, so its start is cheap and its memory
is returned. The engine's own process never imports them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from components.outside_json import JsonObject
from flows.execution.machine_folders import place_for_sockets
from flows.execution.messages import OnJson, StepOrder
from flows.execution.step_worker import GRACE_SECONDS, guard

PRELOAD = ("torch", "transformers", "safetensors.torch", "psutil", "flows.planning.step_signature")
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Threads that spin long at barriers stand still when cores are shared: beside other work 2 threads took 12 times as
    # long as 1. A short spin keeps what a second thread gains on a quiet machine (1.7 times) and gives up early else.
    "GOMP_SPINCOUNT": "3000",
}
SOCKET_NAME_BYTES = 33  # of "/pymp-xxxxxxxx/listener-xxxxxxxx", which multiprocessing adds
_start_lock = threading.Lock()


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended: "made", "nothing_new", "user_error" or "failed" (also: timed out, killed)."""

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
    process, connection = _start(order, preload)
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


def _start(order: StepOrder, preload: tuple[str, ...]) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=guard, args=(sender, json.dumps(order)), name=f"step {order['key'][:12]}")
    with _start_lock, _nameless_main(), _environment():
        _keep_sockets_short()
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
        process.join(3 * GRACE_SECONDS)
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
