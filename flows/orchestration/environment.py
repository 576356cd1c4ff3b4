"""The environment that Prefect finds when it is first imported: where its server is, quiet, without telemetry.

Prefect reads its settings once, when it is imported. So this module and temporary_server.py import none of it, and
whatever does is imported when `prepare` or `prefect_server` has run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.orchestration.temporary_server import TemporaryServer, answers, temporary_server
from flows.services.client import QUIET, client_environment, running
from storage.redaction import without_secrets


def prepare(home: Path) -> str:
    """Set Prefect's environment and return the address of its server, "" where none answers.

    The server at $PREFECT_API_URL comes first, then the one of `draftsmith up`.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")  # the terminal has our own progress
    place = Path(os.environ.setdefault("PREFECT_HOME", str(home / "prefect")))
    place.mkdir(parents=True, exist_ok=True)
    address = os.environ.get("PREFECT_API_URL", "")
    if address and answers(address):
        return address
    services = running(home)
    reachable = services is not None and answers(services.prefect_api_url)
    if address:
        instead = "the one of `draftsmith up`" if reachable else "a temporary one"
        sys.stderr.write(f"no Prefect server answers at {without_secrets(address)}: taking {instead}\n")
    if services is None or not reachable:
        return ""
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    os.environ.update(client_environment(services))
    return services.prefect_api_url


@contextmanager
def prefect_server(home: Path) -> Iterator[TemporaryServer | None]:
    """Prefect's environment with a server: None is one that goes on after the block and whose UI people look at.

    Where none answers, a temporary one runs for the time of the block. It comes up while its caller goes on, who
    calls its `wait` before the first request.
    """
    if prepare(home):
        yield None
        return
    assert "prefect" not in sys.modules, "Prefect reads its settings once, when it is imported"
    with temporary_server(Path(os.environ["PREFECT_HOME"])) as server:
        before = {name: os.environ.pop(name, None) for name in server.client_environment}
        os.environ.update(server.client_environment)
        try:
            yield server
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
