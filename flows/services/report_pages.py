"""ASGI middleware that serves report pages at /reports/KEY/, so that their links work from other machines.

They are those of a home and of its shared store. It stands behind the same guard and password as MLflow's server, which
it is part of. A page is served as it was sealed, file by file as its record names them, and in a sandbox: what it holds
reaches neither MLflow nor anything else.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from components.contract import UserError
from storage.artifacts.sessions import require_path_part
from storage.artifacts.store import Store

PREFIX = "/reports/"
_ALONE = "sandbox allow-scripts allow-popups; default-src 'none'; style-src 'unsafe-inline'; img-src data: 'self'; "
_ALONE += "script-src 'unsafe-inline'"


class ReportPages:
    """Answers GET /reports/KEY/FILE, index.html where no file is named; passes on everything else."""

    def __init__(self, app: ASGIApp, home: Path) -> None:
        self.app, self.home = app, home

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX) or scope["method"] not in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        key, _, name = scope["path"].removeprefix(PREFIX).partition("/")
        answer = await asyncio.to_thread(report_page, self.home, key, name)
        await answer(scope, receive, send)


def report_page(home: Path, key: str, name: str) -> Response:
    """The answer with a file of a report; name "": index.html. May take long: the shared store may have to be asked."""
    try:
        store = Store(home)
        record = store.record_of(require_path_part(key))
    except (UserError, FileNotFoundError):
        record = None
    name = name or "index.html"
    if record is None or record["kind"] != "Page" or name not in record["files"]:
        return PlainTextResponse("There is no such report in this home.\n", status_code=404)
    file = store.path_of(key) / name
    if not file.is_file():
        store.ensure_local(key)
    if not file.is_file():
        return PlainTextResponse("This report was collected; its pipeline makes it anew.\n", status_code=404)
    return FileResponse(file, headers={"Content-Security-Policy": _ALONE, "X-Content-Type-Options": "nosniff"})
