"""The supervisor behind `draftsmith up`: starts the parts, restarts what dies or hangs, stops the tree on SIGTERM.

    supervisor --> prefect, mlflow, then (once Prefect answers) worker --> a process for each run, and watch

It imports none of what it runs, so it stays small and cannot fall with it. Two never run on one home: the supervisor
holds a lock on `home/services.pid`. A part that dies is started again, at once the first time and later and later while
it keeps dying; what it has left of its process group is killed first. Runs outlive a killed worker or server: they go
on and report when the server is back. `up` starts it as `python -m flows.services HOME FILE PREFECT_PORT MLFLOW_PORT`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
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

from flows.service_address import WORK_POOL, address_file, pid_file, write_address
from flows.service_api import ApiError, PrefectApi, healthy, worker_is_online
from flows.service_parts import MARK, Part, Settings, ensure_auth_string, parts_of, services_of
from flows.service_reconcile import Reconciler

TICK_S = 0.25
PROBE_EVERY_S = 5.0
PROBE_WHILE_STARTING_S = 0.5
UNWELL_AFTER_S = 15.0  # of no answer from a part that did answer: a busy machine may miss one
HANGS_AFTER_S = 90.0  # the same, after which it is started again
HEARD_WITHIN_S = 120.0  # a worker says every 30 s that it lives
STARTS_WITHIN_S = 240.0
MAX_BACKOFF_S = 30.0
SETTLED_AFTER_S = 60.0  # a part that lived so long starts its back-off anew
MAX_LOG_BYTES = 20 << 20
RECONCILE_EVERY_S = 5.0
LEFTOVERS_END_WITHIN_S = 10.0


@dataclass
class Running:
    """A part and what the supervisor knows of it."""

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
    """Keeps the parts of one home running until it is told to stop."""

    settings: Settings
    running: dict[str, Running] = field(default_factory=dict)
    asked_to_stop: threading.Event = field(default_factory=threading.Event)
    migrating: IO[str] | None = None

    def run(self) -> None:
        """Start everything, look after it, stop everything; returns after SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            # in a thread: the main one may hold the event's lock just where the signal interrupts it
            signal.signal(number, lambda *_: threading.Thread(target=self.asked_to_stop.set, daemon=True).start())
        home = self.settings.home
        with only_one(home):
            end_leftovers(home)
            ensure_auth_string(home)
            self._wait_for_temporary_server()
            write_address(home, services_of(self.settings, os.getpid()))
            self.running = {part.name: Running(part) for part in parts_of(self.settings)}
            try:
                reconciler = threading.Thread(target=self._reconcile, name="reconciler", daemon=True)
                reconciler.start()
                while not self.asked_to_stop.is_set():
                    self.tick()
                    self.asked_to_stop.wait(TICK_S)
            finally:
                self.stop()
                self._has_migrated()
                address_file(home).unlink(missing_ok=True)

    def tick(self) -> None:
        """Look at every part once: start, notice a death, ask for health."""
        changed = False
        for one in self.running.values():
            if one.process is not None and one.process.poll() is not None:
                self._died(one, f"ended with {one.process.returncode}")
                changed = True
            if one.process is None and time.monotonic() >= one.start_at and self._may_start(one.part):
                self._start(one)
                changed = True
            changed |= self._probe(one)
        if changed:
            self._tell()

    def stop(self) -> None:
        """End the worker and its runs while the server still listens, then the servers; leave nothing behind."""
        say("stopping")
        first = [one for one in self.running.values() if one.part.after]
        for group in (first, [one for one in self.running.values() if not one.part.after]):
            for one in group:
                _signal_group(one.process, signal.SIGTERM)
            deadline = time.monotonic() + max((one.part.stop_s for one in group), default=0.0)
            for one in group:
                if one.process is not None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        one.process.wait(max(0.1, deadline - time.monotonic()))
                    _signal_group(one.process, signal.SIGKILL)
                    one.process.wait()
        end_leftovers(self.settings.home)
        say("stopped")

    def _may_start(self, part: Part) -> bool:
        return all(self.running[name].is_healthy for name in part.after if name in self.running)

    def _start(self, one: Running) -> None:
        command = (sys.executable, "-m", "flows.service_child", str(os.getpid()), *one.part.command)
        with open_log(self.settings.logs / f"{one.part.name}.log") as log:
            # a group of its own: what it leaves behind when it dies can be found, and Ctrl-C is ours to handle
            one.process = subprocess.Popen(
                command,
                env=one.part.environment,
                cwd=self.settings.file.absolute().parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        one.started = one.answered = time.monotonic()
        one.probed, one.is_healthy, one.has_been_healthy = 0.0, False, False
        say(f"{one.part.name}: started as process {one.process.pid}")

    def _died(self, one: Running, how: str) -> None:
        assert one.process is not None
        _signal_group(one.process, signal.SIGKILL)
        one.process.wait()
        lived = time.monotonic() - one.started
        one.in_a_row = 1 if lived > SETTLED_AFTER_S else one.in_a_row + 1
        backoff = min(MAX_BACKOFF_S, 2.0 ** (one.in_a_row - 1) - 1.0)  # 0, 1, 3, 7, 15, 30 s
        one.process, one.is_healthy, one.last_end = None, False, how
        one.restarts += 1
        one.start_at = time.monotonic() + backoff
        say(f"{one.part.name}: {how} after {lived:.0f} s; starts again in {backoff:.0f} s")

    def _probe(self, one: Running) -> bool:
        """Ask a part how it is when it is time to; True when the answer is new."""
        now = time.monotonic()
        if one.process is None or now - one.probed < (PROBE_EVERY_S if one.is_healthy else PROBE_WHILE_STARTING_S):
            return False
        one.probed = now
        before = one.is_healthy
        if self._is_well(one):
            if not one.has_been_healthy:
                if one.part.name == "prefect":
                    self._has_migrated()
                say(f"{one.part.name}: healthy after {now - one.started:.0f} s")
            one.is_healthy, one.has_been_healthy, one.answered = True, True, now
        elif now - one.answered > (HANGS_AFTER_S if one.has_been_healthy else STARTS_WITHIN_S):
            self._died(one, f"did not answer for {now - one.answered:.0f} s")
        elif before and now - one.answered > UNWELL_AFTER_S:
            one.is_healthy = False
            say(f"{one.part.name}: does not answer")
        return one.is_healthy != before

    def _is_well(self, one: Running) -> bool:
        """A server answers; a worker was heard since it started, and lately; no part is stopped (SIGSTOP)."""
        if one.process is not None and _is_stopped(one.process.pid):
            return False
        if one.part.health_url:
            return healthy(one.part.health_url)
        if not one.part.worker_name:
            return True
        services = services_of(self.settings, os.getpid())
        api = PrefectApi(services.prefect_api_url, services.auth_string, busy_for_s=0.0)
        lived = time.monotonic() - one.started
        try:
            return worker_is_online(api, WORK_POOL, one.part.worker_name, time.time() - min(lived, HEARD_WITHIN_S))
        except ApiError:
            return one.is_healthy  # the server does not answer, which says nothing new about the worker

    def _wait_for_temporary_server(self) -> None:
        """Two first starts must not migrate one database at once: `draftsmith run` without us starts its own server."""
        lock = self.settings.home / "prefect" / "server.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        self.migrating = lock.open("a", encoding="utf-8")
        fcntl.flock(self.migrating, fcntl.LOCK_EX)

    def _has_migrated(self) -> None:
        if self.migrating is not None:
            self.migrating.close()
            self.migrating = None

    def _tell(self) -> None:
        """For `status`: what runs, how often it was restarted."""
        told = {
            name: {
                "pid": one.process.pid if one.process else None,
                "healthy": one.is_healthy,
                "restarts": one.restarts,
                "last_end": one.last_end,
                "health_url": one.part.health_url,
            }
            for name, one in self.running.items()
        }
        file = state_file(self.settings.home)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(told, indent=2), encoding="utf-8")
        partial.replace(file)

    def _reconcile(self) -> None:
        """Every few seconds: runs whose process is gone get their end."""
        services = services_of(self.settings, os.getpid())
        api = PrefectApi(services.prefect_api_url, services.auth_string, busy_for_s=0.0)  # its next round asks again
        reconciler = Reconciler(api, self.settings.home)
        while not self.asked_to_stop.wait(RECONCILE_EVERY_S):
            if self.running["prefect"].is_healthy:
                worker = self.running["worker"].process
                for line in reconciler.tick(worker.pid if worker is not None else None):
                    say(line)
            else:
                reconciler.lost_sight()


@contextlib.contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold the home for this supervisor. Raises BlockingIOError when another one does."""
    file = pid_file(home)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as lock:
        deadline = time.monotonic() + 2.0  # a reader of the lock holds it for an instant
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def end_leftovers(home: Path) -> list[int]:
    """Kill every other process that a supervisor of this home has started, however deep; returns their ids, once
    they are gone and hold no port any more.

    Raises:
        RuntimeError: some do not end.
    """
    ended: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + LEFTOVERS_END_WITHIN_S
    for _ in range(3):  # one may have forked while we looked; not for ever: another `up` may be starting its own
        found = marked(home)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                ended[process.pid] = process
        while not all(map(has_ended, found)) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not found:
            break
    if left := [pid for pid, process in ended.items() if not has_ended(process)]:
        raise RuntimeError(f"processes {', '.join(map(str, left))} of {home} were killed and do not end")
    return sorted(ended)


def has_ended(process: psutil.Process) -> bool:
    """It is gone, or a zombie that holds nothing. (One that just ends has no environment left, but still its ports.)"""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def marked(home: Path) -> list[psutil.Process]:
    """Every process but this one that stands below a supervisor of this home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone by now
            if process.pid != os.getpid() and process.environ().get(MARK) == str(home):
                found.append(process)
    return found


def state_file(home: Path) -> Path:
    """What the supervisor last said of its parts, as JSON."""
    return home / "logs" / "services" / "state.json"


def open_log(file: Path) -> IO[bytes]:
    """The end of a log; one that has grown too large is set aside first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file() and file.stat().st_size > MAX_LOG_BYTES:
        file.replace(file.with_suffix(".log.old"))
    return file.open("ab")


def say(line: str) -> None:
    """A line of the supervisor's own log, which is its standard output."""
    sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    sys.stdout.flush()


def _is_stopped(pid: int) -> bool:
    try:
        return str(psutil.Process(pid).status()) == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _signal_group(process: subprocess.Popen[bytes] | None, number: int) -> None:
    """To the part and what it has started in its own group."""
    if process is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def main(arguments: list[str]) -> int:
    """Entry point of the supervisor's process: HOME FILE PREFECT_PORT MLFLOW_PORT."""
    home, file, prefect_port, mlflow_port = arguments
    settings = Settings(Path(home), Path(file), int(prefect_port), int(mlflow_port))
    try:
        Supervisor(settings).run()
    except BlockingIOError:
        say("another supervisor holds this home")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
