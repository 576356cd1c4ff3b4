"""A real serving engine on loopback for as long as a test needs it, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def served(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process group of its own; it is asked to end, and after ten seconds made to."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a served process and all that it started at once, as a crash of the machine would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def requests_ended(address: str) -> int:
    """How many requests this vLLM has answered to their end."""
    with urllib.request.urlopen(address.removesuffix("/v1") + "/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    said = [line for line in lines if line.startswith("vllm:request_success_total{")]
    ended = [line for line in said if 'finished_reason="stop"' in line or 'finished_reason="length"' in line]
    assert len(ended) == 2, said
    return sum(round(float(line.rsplit(" ", 1)[1])) for line in ended)
