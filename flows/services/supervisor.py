"""The supervisor behind `draftsmith up`: starts the parts, restarts what dies or hangs, stops the tree on SIGTERM.

    supervisor --> prefect, mlflow, then (once Prefect answers) worker --> a process for each run, and watch

It imports nothing that it runs, so it stays small and cannot crash with it. A lock on `home/services.pid` allows one
supervisor a home. A part that dies is started again, at once the first time and with growing delays while it keeps
dying; the rest of its process group is killed first. Runs outlive a killed worker or server: they go
on and report when the server is back. `up` starts it as `python -m flows.services.supervisor HOME FILE PREFECT_PORT
MLFLOW_PORT PUBLIC_URL`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from components.files import open_lock, try_lock, wait_for_lock, write_whole
from flows.services.child import bound
from flows.services.client import (
    WORK_POOL,
    ApiError,
    PrefectApi,
    address_file,
    healthy,
    pid_file,
    worker_is_online,
    write_address,
)
from flows.services.processes import MARK, Part, Settings, ensure_auth_string, parts_of, services_of
from flows.services.reconcile import EVERY_S, Reconciler, log_line, processes_by

TICK_S = 0.25
PROBE_EVERY_S = 5.0
PROBE_WHILE_STARTING_S = 0.5
UNWELL_AFTER_S = 15.0  # without an answer from a part that did answer: a busy machine may miss one
HANGS_AFTER_S = 90.0  # the same, after which it is started again
HEARD_WITHIN_S = 120.0  # a worker sends a heartbeat every 30 s
STARTS_WITHIN_S = 240.0
MAX_BACKOFF_S = 30.0
SETTLED_AFTER_S = 60.0  # a part that lived so long starts its back-off anew
MAX_LOG_BYTES = 20 << 20  # and as much again in .log.old
LOGS_CHECKED_EVERY_S = 30.0
LEFTOVERS_END_WITHIN_S = 10.0


@dataclass
class PartProcess:
    """A part and its state in the supervisor."""

    part: Part
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # monotonic, s
    start_at: float = 0.0  # not before this moment
    is_healthy: bool = False
    has_been_healthy: bool = False  # since it was started last
    probed: float = 0.0
    answered: float = 0.0
    restarts: int = 0
    in_a_row: int = 0  # deaths without a settled life in between
    last_end: str = ""


@dataclass
class Supervisor:
    """Keeps the parts of one home running until SIGTERM or SIGINT."""

    settings: Settings
    running: dict[str, PartProcess] = field(default_factory=dict)
    asked_to_stop: threading.Event = field(default_factory=threading.Event)
    migrating: IO[str] | None = None
    logs_checked: float = 0.0  # monotonic, s

    def run(self) -> None:
        """Start, watch and stop all parts; returns after SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            # in a thread: the main one may hold the event's lock just where the signal interrupts it
            signal.signal(number, lambda *_: threading.Thread(target=self.asked_to_stop.set, daemon=True).start())
        home = self.settings.home
        with single_supervisor(home):
            kill_leftovers(home)
            ensure_auth_string(home)
            self._wait_for_temporary_server()
            write_address(home, services_of(self.settings, os.getpid()))
            self.running = {part.name: PartProcess(part) for part in parts_of(self.settings)}
            try:
                reconciler = threading.Thread(target=self._reconcile, name="reconciler", daemon=True)
                reconciler.start()
                while not self.asked_to_stop.is_set():
                    self.tick()
                    self.asked_to_stop.wait(TICK_S)
            finally:
                self.stop()
                self._release_migration_lock()
                address_file(home).unlink(missing_ok=True)

    def tick(self) -> None:
        """Handle every part once: start it, notice its death, probe its health."""
        changed = False
        for child in self.running.values():
            if child.process is not None and child.process.poll() is not None:
                self._handle_death(child, f"ended with {child.process.returncode}")
                changed = True
            if child.process is None and time.monotonic() >= child.start_at and self._may_start(child.part):
                self._start(child)
                changed = True
            changed |= self._probe(child)
        if time.monotonic() - self.logs_checked > LOGS_CHECKED_EVERY_S:
            self.logs_checked = time.monotonic()
            for log in self.settings.logs.glob("*.log"):
                bound_log(log)
        if changed:
            self._write_state()

    def stop(self) -> None:
        """End the worker and its runs while the server still listens, then the servers; leave nothing behind."""
        log_line("stopping")
        first = [child for child in self.running.values() if child.part.after]
        for group in (first, [child for child in self.running.values() if not child.part.after]):
            for child in group:
                _signal_group(child.process, signal.SIGTERM)
            deadline = time.monotonic() + max((child.part.stop_s for child in group), default=0.0)
            for child in group:
                if child.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(max(0.1, deadline - time.monotonic()))
                    _signal_group(child.process, signal.SIGKILL)
                    child.process.wait()
        kill_leftovers(self.settings.home)
        log_line("stopped")

    def _may_start(self, part: Part) -> bool:
        return all(self.running[name].is_healthy for name in part.after if name in self.running)

    def _start(self, child: PartProcess) -> None:
        with open_log(self.settings.logs / f"{child.part.name}.log") as log:
            # a group of its own: what it leaves behind when it dies can be found, and Ctrl-C is ours to handle
            child.process = subprocess.Popen(
                bound(child.part.command),
                env=child.part.environment,
                cwd=self.settings.file.absolute().parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        child.started = child.answered = time.monotonic()
        child.probed, child.is_healthy, child.has_been_healthy = 0.0, False, False
        log_line(f"{child.part.name}: started as process {child.process.pid}")

    def _handle_death(self, child: PartProcess, how: str) -> None:
        assert child.process is not None
        _signal_group(child.process, signal.SIGKILL)
        child.process.wait()
        lifetime_s = time.monotonic() - child.started
        child.in_a_row = 1 if lifetime_s > SETTLED_AFTER_S else child.in_a_row + 1
        backoff = min(MAX_BACKOFF_S, 2.0 ** (child.in_a_row - 1) - 1.0)  # 0, 1, 3, 7, 15, 30 s
        child.process, child.is_healthy, child.last_end = None, False, how
        child.restarts += 1
        child.start_at = time.monotonic() + backoff
        log_line(f"{child.part.name}: {how} after {lifetime_s:.0f} s; starts again in {backoff:.0f} s")

    def _probe(self, child: PartProcess) -> bool:
        """Probe the health of a part when it is due; True when it has changed."""
        now = time.monotonic()
        interval_s = PROBE_EVERY_S if child.is_healthy else PROBE_WHILE_STARTING_S
        if child.process is None or now - child.probed < interval_s:
            return False
        child.probed = now
        before = child.is_healthy
        if self._is_well(child):
            if not child.has_been_healthy:
                if child.part.name == "prefect":
                    self._release_migration_lock()
                log_line(f"{child.part.name}: healthy after {now - child.started:.0f} s")
            child.is_healthy, child.has_been_healthy, child.answered = True, True, now
        elif now - child.answered > (HANGS_AFTER_S if child.has_been_healthy else STARTS_WITHIN_S):
            self._handle_death(child, f"did not answer for {now - child.answered:.0f} s")
        elif before and now - child.answered > UNWELL_AFTER_S:
            child.is_healthy = False
            log_line(f"{child.part.name}: does not answer")
        return child.is_healthy != before

    def _is_well(self, child: PartProcess) -> bool:
        """Whether a server answers, a worker was heard lately and since its start, and no part is stopped (SIGSTOP)."""
        if child.process is not None and _is_stopped(child.process.pid):
            return False
        if child.part.health_url:
            return healthy(child.part.health_url)
        if not child.part.worker_name:
            return True
        services = services_of(self.settings, os.getpid())
        api = PrefectApi(services.prefect_api_url, services.auth_string, busy_for_s=0.0)
        since = time.time() - min(time.monotonic() - child.started, HEARD_WITHIN_S)
        try:
            return worker_is_online(api, WORK_POOL, child.part.worker_name, since)
        except ApiError:
            return child.is_healthy  # the server does not answer, which says nothing new about the worker

    def _wait_for_temporary_server(self) -> None:
        """Wait for the server that `draftsmith run` starts by itself: two servers must not migrate one database."""
        lock = self.settings.home / "prefect" / "server.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        self.migrating = open_lock(lock)
        wait_for_lock(self.migrating)

    def _release_migration_lock(self) -> None:
        if self.migrating is not None:
            self.migrating.close()
            self.migrating = None

    def _write_state(self) -> None:
        """Write the state of each part for `status`."""
        states = {
            name: {
                "pid": child.process.pid if child.process else None,
                "healthy": child.is_healthy,
                "restarts": child.restarts,
                "last_end": child.last_end,
                "health_url": child.part.health_url,
            }
            for name, child in self.running.items()
        }
        write_whole(state_file(self.settings.home), json.dumps(states, indent=2))

    def _reconcile(self) -> None:
        """End runs whose process is gone, every few seconds (in a thread of its own)."""
        services = services_of(self.settings, os.getpid())
        api = PrefectApi(services.prefect_api_url, services.auth_string, busy_for_s=0.0)  # its next round asks again
        reconciler = Reconciler(api)
        while not self.asked_to_stop.wait(EVERY_S):
            if self.running["prefect"].is_healthy:
                worker = self.running["worker"].process
                for line in reconciler.tick(worker.pid if worker is not None else None):
                    log_line(line)
            else:
                reconciler.forget_silence()


@contextlib.contextmanager
def single_supervisor(home: Path) -> Iterator[None]:
    """Hold the home for this supervisor. Raises BlockingIOError when another one does."""
    file = pid_file(home)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        deadline = time.monotonic() + 2.0  # a reader of the lock holds it for an instant
        while not try_lock(lock):
            if time.monotonic() > deadline:
                raise BlockingIOError(f"{file} is held by another supervisor")
            time.sleep(0.05)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def kill_leftovers(home: Path) -> list[int]:
    """Kill every other process that a supervisor of this home has started, however deep; returns their ids, once
    they are gone and hold no port any more.

    Raises:
        RuntimeError: some do not end.
    """
    killed: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + LEFTOVERS_END_WITHIN_S
    for _ in range(3):  # one may have forked while we looked; not for ever: another `up` may be starting its own
        alive = processes_of_home(home)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed[process.pid] = process
        while not all(map(is_dead, alive)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not alive:
            break
    if survivors := [pid for pid, process in killed.items() if not is_dead(process)]:
        raise RuntimeError(f"processes {', '.join(map(str, survivors))} of {home} were killed and do not end")
    return sorted(killed)


def is_dead(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie. (While it ends it has no environment any more, but still its ports.)"""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes_of_home(home: Path) -> list[psutil.Process]:
    """Every process but this one that runs below a supervisor of this home."""
    return [process for process in processes_by(MARK).get(str(home), []) if process.pid != os.getpid()]


def state_file(home: Path) -> Path:
    """The file with the last state of the supervisor's parts, as JSON."""
    return home / "logs" / "services" / "state.json"


def open_log(file: Path) -> IO[bytes]:
    """Open a log for appending."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        bound_log(file)
    return file.open("ab")


def bound_log(file: Path) -> None:
    """Empty a log that has grown too large, after copying it to .log.old; who has it open for appending goes on in it.

    A line that is written between the two is lost.
    """
    if file.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(file, file.with_suffix(".log.old"))
        os.truncate(file, 0)


def _is_stopped(pid: int) -> bool:
    try:
        return str(psutil.Process(pid).status()) == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _signal_group(process: subprocess.Popen[bytes] | None, number: int) -> None:
    """Send a signal to the part and to its process group."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def main(arguments: list[str]) -> int:
    """Entry point of the supervisor's process: HOME FILE PREFECT_PORT MLFLOW_PORT PUBLIC_URL."""
    home, file, prefect_port, mlflow_port, public_url = arguments
    settings = Settings(Path(home), Path(file), int(prefect_port), int(mlflow_port), public_url)
    try:
        Supervisor(settings).run()
    except BlockingIOError:
        log_line("another supervisor holds this home")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
