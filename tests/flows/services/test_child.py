"""A part is not started for a supervisor that is gone, and ends with one that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CHILD = [sys.executable, "-m", "flows.services.child"]
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:3], "flows.services.child", str(os.getpid()), "sleep", "60"])
print(child.pid, flush=True)
os.kill(os.getpid(), 9) if sys.stdin.read() == "" else None
"""


def test_the_command_runs_under_its_parent_alone() -> None:
    for parent, output in ((os.getpid(), "here\n"), (1, "")):
        done = subprocess.run([*CHILD, str(parent), "echo", "here"], capture_output=True, text=True, check=False)
        assert done.stdout == output


def test_it_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *CHILD[:2]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    with open(f"/proc/{pid}/comm", encoding="ascii") as comm:
        while comm.seek(0) == 0 and comm.read().strip() != "sleep":  # the setting is made before the exec
            pass
    parent.stdin.close()
    assert parent.wait(30) == -signal.SIGKILL
    parent.stdout.close()
    while True:  # whoever adopts it takes its end in
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as status:
                if status.read().split()[2] == "Z":
                    return
        except (FileNotFoundError, ProcessLookupError):
            return
