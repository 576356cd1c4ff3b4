"""PREFECT: its server behind the guard (`uvicorn --factory flows.orchestration.server_app:create_app`, and
`create_temporary_app` for the time of a run). Its password is asked for by Prefect itself.
"""

from __future__ import annotations

import os

from prefect.server.api.server import create_app as prefect_app
from starlette.types import ASGIApp

from flows.dashboard.served import WithDashboard
from flows.services.client import public_url
from flows.services.server_guard import LOOPBACK, KnownPlacesOnly, OwnConnectionsOnly, SignedInByProxy, allowed_hosts
from storage.artifacts.store import default_home


def create_app() -> ASGIApp:
    """Prefect's API, UI and background services, and the dashboard, for hosts and origins we know."""
    password = os.environ.get("PREFECT_SERVER_API_AUTH_STRING", "")
    pages = WithDashboard(prefect_app(final=True), default_home(), password)
    signed_in = SignedInByProxy(pages, public_url(), password)
    return OwnConnectionsOnly(KnownPlacesOnly(signed_in, allowed_hosts()))


def create_temporary_app() -> ASGIApp:
    """Prefect's API alone, for the time of one run (flows/orchestration/prefect_server.py)."""
    return KnownPlacesOnly(prefect_app(), frozenset(LOOPBACK))
