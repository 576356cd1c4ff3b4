"""The dashboard as a page of `draftsmith up`, beside Prefect's: `/dashboard`, with the report pages that it links to.

Each look makes it anew in a process of its own, at most one at a time and not more often than FRESH_S, so that the
server neither waits for questions over the history nor keeps their memory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.services.report_pages import report_page
from flows.services.server_guard import BehindPassword

PLACE = "/dashboard"
FRESH_S = 30.0
MADE_WITHIN_S = 120.0


class WithDashboard:
    """Prefect's app, with the dashboard of a home under PLACE; auth_string "": nobody is asked for a password."""

    def __init__(self, app: ASGIApp, home: Path, auth_string: str) -> None:
        page = dashboard_app(home)
        self.app, self.page = app, BehindPassword(page, auth_string) if auth_string else page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the one or the other."""
        path = scope.get("path", "")
        is_page = scope["type"] == "http" and (path == PLACE or path.startswith(f"{PLACE}/"))
        await (self.page if is_page else self.app)(scope, receive, send)


def dashboard_app(home: Path) -> Starlette:
    """The dashboard of a home and its report pages."""
    file = home / "dashboard" / "served.html"
    making = asyncio.Lock()

    async def dashboard(request: Request) -> Response:
        async with making:
            age = time.time() - file.stat().st_mtime if file.is_file() else FRESH_S
            problem = await _make(file) if age >= FRESH_S else ""
        if problem:
            return PlainTextResponse(f"the dashboard could not be made: {problem}\n", status_code=500)
        return FileResponse(file, media_type="text/html", headers={"Cache-Control": "no-store"})

    async def report(request: Request) -> Response:
        return await asyncio.to_thread(report_page, home, request.path_params["key"], "")

    async def moved(request: Request) -> Response:
        return RedirectResponse(f"{PLACE}/")

    routes = [
        Route(PLACE, moved),
        Route(f"{PLACE}/", dashboard),
        Route(f"{PLACE}/reports/{{key}}/index.html", report),
    ]
    return Starlette(routes=routes)


async def _make(file: Path) -> str:
    """Make the page anew; returns why that failed, in one line, or ""."""
    command = (sys.executable, "-m", "flows.cli", "dashboard", "--to", str(file), "--reports-at", f"{PLACE}/reports")
    file.parent.mkdir(parents=True, exist_ok=True)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        _, errors = await asyncio.wait_for(process.communicate(), MADE_WITHIN_S)
    except (TimeoutError, asyncio.CancelledError) as error:
        process.kill()
        await process.wait()
        if isinstance(error, asyncio.CancelledError):
            raise
        return f"it took longer than {MADE_WITHIN_S:.0f} s; try: draftsmith dashboard"
    lines = errors.decode(errors="replace").strip().splitlines()
    return (lines[-1] if lines else f"it ended with {process.returncode}") if process.returncode else ""
