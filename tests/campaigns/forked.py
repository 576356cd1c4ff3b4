"""A case of a campaign runs in a child of its own: whatever becomes of it, the campaign goes on and knows how it ended.

The child is forked from a process that has the libraries loaded, so a case costs what it does and not its imports.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from toy_garden import PACKAGES

from flows import cli
from flows.execution import engine
from flows.execution.step_process import ENVIRONMENT, PRELOAD

SEED = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0"))  # of the whole campaigns, which `make soak` runs
TOO_LONG = 1200  # characters of a line that is meant for a person


@dataclass(frozen=True)
class Ended:
    """How a child ended. code: its exit status, minus the signal's number where one ended it, None where it had to be
    killed because it went on after its limit. said: all that it printed."""

    code: int | None
    said: str
    seconds: float

    @property
    def fault(self) -> str:
        """What no input may ever bring about: a hang, a death, a traceback, an error without a name; "" if all is well.

        Exit codes 0, 1 and 2 are answers, of which 1 and 2 come with at least one line.
        """
        lines = self.said.strip().splitlines()
        unnamed = next((line for line in lines if line.startswith("failed: ")), "")
        if self.code is None:
            return f"still going on after {self.seconds:.0f} s: {self.said[-300:]}"
        if self.code < 0:
            return f"died of {signal.Signals(-self.code).name}: {self.said[-300:]}"
        if "Traceback (most recent call last)" in self.said:
            return f"a traceback: {self.said[-1500:]}"
        if unnamed:
            return f"an error without a name: {unnamed}"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}: {self.said[-300:]}"
        if self.code != 0 and not lines:
            return f"exit code {self.code} without a word"
        if any(len(line) > TOO_LONG for line in lines):
            return f"a line of {max(map(len, lines))} characters: {max(lines, key=len)[:300]}"
        return ""


def forked(
    act: Callable[[], int | None],
    *,
    limit_s: float = 300.0,
    environment: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    kill_after_s: float | None = None,
    warm: bool = False,
) -> Ended:
    """Do it in a child, in a process group of its own; what it gives is its exit code (None: 0).

    memory_bytes: how much more memory than now the child may map. kill_after_s: SIGKILL to the whole group after so
    long, as a machine that goes down; without it, that happens only to a child that is not done after limit_s. warm:
    steps are forked from the server of `warm_up`, so that no case loads their libraries; they die by their leash.
    """
    with tempfile.TemporaryFile() as told:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_child(act, told.fileno(), environment or {}, memory_bytes, warm)
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)  # the child does it too: whoever is first
        deadline = started + (limit_s if kill_after_s is None else kill_after_s)
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code: int | None = os.waitstatus_to_exitcode(status)
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                code = None if kill_after_s is None else -signal.SIGKILL
                break
            time.sleep(0.003)
        seconds = time.monotonic() - started
        told.seek(0)
        return Ended(code, told.read().decode("utf-8", "replace"), seconds)


def warm_up(environment: Mapping[str, str], modules: Sequence[str]) -> None:
    """Start the fork server of steps in this process, for the children that are `warm`. modules: loaded there too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **environment}.items():
            patch.setenv(name, value)
        forkserver.set_forkserver_preload([*PRELOAD, *modules])
        forkserver.ensure_running()


def draftsmith(
    *arguments: str, home: Path, limit_s: float = 300.0, kill_after_s: float | None = None, **environment: str
) -> Ended:
    """`draftsmith ARGUMENTS` on a home, with the toy steps of tests/flows beside the real ones."""
    settings = {"DRAFTSMITH_HOME": str(home), "TMPDIR": str(home.parent), **environment}
    return forked(lambda: _command(arguments), limit_s=limit_s, environment=settings, kill_after_s=kill_after_s)


def recorded(name: str, campaign: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Carry a whole campaign out and leave its record, benchmarks/results/soak-NAME-DATE.json; what it found."""
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    started = time.monotonic()
    found = campaign()
    write_record(f"soak-{name}", {"seed": SEED, **found, "seconds": round(time.monotonic() - started, 1)})
    return found


def _command(arguments: tuple[str, ...]) -> int:
    assert engine.Engine.__init__.__kwdefaults__ is not None
    engine.Engine.__init__.__kwdefaults__["preload"] = ()  # toys need nothing heavy, and each run starts a server
    return cli.main(arguments, packages=PACKAGES)


def _be_child(
    act: Callable[[], int | None], told: int, environment: Mapping[str, str], memory_bytes: int | None, warm: bool
) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        os.dup2(told, 1)
        os.dup2(told, 2)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        # The server that the parent may have started is no child of this process, which cannot wait for it.
        server = forkserver._forkserver  # type: ignore[attr-defined]
        if warm:
            assert server._forkserver_address is not None, "warm_up() comes first"
            forkserver.ensure_running = server.ensure_running = lambda: None
        else:
            server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
        if "TMPDIR" in environment:
            tempfile.tempdir = None
        if memory_bytes is not None:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes, mapped + memory_bytes))
        code = act() or 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
