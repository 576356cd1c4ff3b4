"""The supervisor with real processes in the place of servers: what dies comes back, what is stopped is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flows.services import supervisor as services
from flows.services.client import pid_file
from flows.services.control import stop
from flows.services.processes import MARK, Part, Settings
from flows.services.supervisor import (
    PartProcess,
    Supervisor,
    is_dead,
    kill_leftovers,
    processes_of_home,
    single_supervisor,
)

SLEEP = "import time; time.sleep(60)"
SLEEPER = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '{SLEEP}']); time.sleep(60)"
SUPERVISOR = f"""\
import os, subprocess, sys, time
command = [sys.executable, "-m", "flows.services.child", str(os.getpid()), sys.executable, "-c", "{SLEEP}"]
subprocess.Popen(command)
time.sleep(60)
"""
LISTENER = """\
import signal, socket, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", 0))
kept = bytearray(300 << 20)  # a process with memory to give back does not end at once
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    settings = Settings(tmp_path / "home", tmp_path / "pipelines.yaml")
    yield settings
    kill_leftovers(settings.home)


@pytest.fixture
def supervisor_of(settings: Settings) -> Callable[..., Supervisor]:
    """A supervisor of programs given as Python text, to be ticked by hand."""

    def make(*programs: str, stop_s: float = 5.0) -> Supervisor:
        environment = {**os.environ, MARK: str(settings.home)}
        parts = [
            Part(f"part{number}", (sys.executable, "-c", program), environment, stop_s=stop_s)
            for number, program in enumerate(programs)
        ]
        return Supervisor(settings, {part.name: PartProcess(part) for part in parts})

    return make


def until(what: Callable[[], object], within_s: float = 20.0) -> None:
    """Return once this is true."""
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if not is_dead(one)]


def test_a_killed_part_is_started_again_and_leaves_nothing_of_its_old_self(
    supervisor_of: Callable[..., Supervisor], settings: Settings
) -> None:
    supervisor = supervisor_of(SLEEPER)
    supervisor.tick()
    one = supervisor.running["part0"]
    assert one.process is not None
    until(lambda: len(processes_of_home(settings.home)) == 2)
    old = processes_of_home(settings.home)
    os.kill(one.process.pid, signal.SIGKILL)
    until(lambda: supervisor.tick() or one.restarts == 1)
    until(lambda: not alive(old))
    until(lambda: supervisor.tick() or one.is_healthy)
    until(lambda: len(processes_of_home(settings.home)) == 2)
    supervisor.stop()
    assert processes_of_home(settings.home) == []


def test_what_keeps_dying_is_started_later_and_later(supervisor_of: Callable[..., Supervisor]) -> None:
    supervisor = supervisor_of("raise SystemExit(3)")
    one = supervisor.running["part0"]
    looked = [0.0]

    def died(times: int) -> bool:
        looked[0] = time.monotonic()
        supervisor.tick()
        return one.restarts == times

    for deaths, wait in enumerate([0, 1, 3, 7, 15, 30], 1):
        one.start_at = 0.0  # do not wait for it here
        until(lambda deaths=deaths: died(deaths))
        assert one.start_at - time.monotonic() - 1e-6 <= wait <= one.start_at - looked[0] + 1e-6, deaths
    assert one.last_end == "ended with 3"


def test_a_part_that_ignores_the_polite_signal_is_killed_in_time(supervisor_of: Callable[..., Supervisor]) -> None:
    supervisor = supervisor_of(STUBBORN, stop_s=0.3)
    supervisor.tick()
    process = supervisor.running["part0"].process
    assert process is not None
    until(lambda: "SIG_IGN" in " ".join(psutil.Process(process.pid).cmdline()))
    started = time.monotonic()
    supervisor.stop()
    assert process.poll() is not None
    assert time.monotonic() - started < 10


def test_a_part_dies_with_its_supervisor(settings: Settings) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SUPERVISOR], env={**os.environ, MARK: str(settings.home)})
    below = [sys.executable, "-c", SLEEP]
    until(lambda: below in [process.cmdline() for process in processes_of_home(settings.home)])
    parts = [process for process in processes_of_home(settings.home) if process.pid != parent.pid]
    parent.kill()
    parent.wait()
    until(lambda: not alive(parts))


def test_two_supervisors_never_hold_one_home(settings: Settings) -> None:
    with single_supervisor(settings.home):
        assert pid_file(settings.home).read_text() == f"{os.getpid()}\n"
        with pytest.raises(BlockingIOError), single_supervisor(settings.home):
            raise AssertionError("two hold it")
    assert pid_file(settings.home).read_text() == ""


def test_down_ends_what_a_killed_supervisor_has_left(settings: Settings) -> None:
    environment = {**os.environ, MARK: str(settings.home)}
    left = subprocess.Popen([sys.executable, "-c", LISTENER], env=environment, stdout=subprocess.PIPE, text=True)
    assert left.stdout is not None
    with left.stdout:
        port = int(left.stdout.readline())
    assert stop(settings.home) is True
    assert processes_of_home(settings.home) == []
    with socket.create_server(("127.0.0.1", port)):  # free at once, for the next `up`
        pass
    assert left.wait(20) == -signal.SIGKILL
    assert stop(settings.home) is False


def test_a_log_that_grows_too_large_begins_anew_while_its_part_goes_on_writing(
    settings: Settings, supervisor_of: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_LOG_BYTES", 10)
    log = settings.logs / "part.log"
    with services.open_log(log) as file:
        for number in range(3):
            file.write(b"%d123456789ABC\n" % number)
            file.flush()
            supervisor = supervisor_of()  # each looks at the logs in its first tick
            supervisor.logs_checked = float("-inf")
            supervisor.tick()
            assert log.stat().st_size == 0
        file.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert log.with_suffix(".log.old").read_bytes() == b"2123456789ABC\n"
