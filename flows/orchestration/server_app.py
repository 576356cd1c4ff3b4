"""PREFECT: its server behind the guard (`uvicorn --factory flows.orchestration.server_app:create_app`, and
`create_temporary_app` for the time of a run). Its password is asked for by Prefect itself.
"""

from __future__ import annotations

from prefect.server.api.server import create_app as prefect_app
from starlette.types import ASGIApp

from flows.services.server_guard import LOOPBACK, KnownPlacesOnly, OwnConnectionsOnly, allowed_hosts


def create_app() -> ASGIApp:
    """Prefect's API, UI and background services, for hosts and origins we know."""
    return OwnConnectionsOnly(KnownPlacesOnly(prefect_app(final=True), allowed_hosts()))


def create_temporary_app() -> ASGIApp:
    """Prefect's API alone, for the time of one run (flows/orchestration/prefect_server.py)."""
    return KnownPlacesOnly(prefect_app(), frozenset(LOOPBACK))
