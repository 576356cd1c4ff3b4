"""PREFECT: its server behind a check of where requests come from (`uvicorn --factory flows.prefect_app:create_app`, and
`create_temporary_app` for the time of a run).

Prefect answers any Host, so a page that points its own name at 127.0.0.1 could read the API; and it never looks at the
Origin of a request that changes something or opens a web socket. Both are refused here, before Prefect sees them.
$DRAFTSMITH_ALLOWED_HOSTS adds names, with commas, for a server behind a proxy or in a container.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
READING = ("GET", "HEAD", "OPTIONS")


def create_app() -> ASGIApp:
    """Prefect's API, UI and background services, for hosts and origins we know."""
    from prefect.server.api.server import create_app as prefect_app

    return KnownPlacesOnly(prefect_app(final=True), allowed_hosts())


def create_temporary_app() -> ASGIApp:
    """Prefect's API alone, for the time of one run (flows/temporary_server.py)."""
    from prefect.server.api.server import create_app as prefect_app

    return KnownPlacesOnly(prefect_app(), frozenset(LOOPBACK))


def allowed_hosts() -> frozenset[str]:
    """Names under which the server may be called, without port."""
    added = os.environ.get("DRAFTSMITH_ALLOWED_HOSTS", "").split(",")
    return frozenset(LOOPBACK) | {name.strip().lower() for name in added if name.strip()}


class KnownPlacesOnly:
    """Refuses a foreign Host with 400, and a change or web socket from a foreign Origin with 403."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] in ("http", "websocket"):
            given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            status, why = self._verdict(scope, given)
            if status:
                await _refuse(scope, receive, send, status, why)
                return
        await self.app(scope, receive, send)

    def _verdict(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str]:
        """(0, "") for a request that may pass, else the status and the reason."""
        if not _names(f"//{headers.get('host', '')}", self.hosts):
            return 400, "This server is not called by that name (Host)."
        origin = headers.get("origin", "")
        changes = scope["type"] == "websocket" or scope["method"] not in READING
        if origin and changes and not _names(origin, self.hosts):
            return 403, "A page from elsewhere may not do this (Origin)."
        return 0, ""


def _names(url: str, hosts: frozenset[str]) -> bool:
    """The URL's host is one of these."""
    try:
        found = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return found in hosts or f"[{found}]" in hosts


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, why: str) -> None:
    from starlette.responses import PlainTextResponse
    from starlette.websockets import WebSocketClose

    if scope["type"] == "websocket":
        await WebSocketClose(code=1008)(scope, receive, send)
    else:
        await PlainTextResponse(why + "\n", status_code=status)(scope, receive, send)
