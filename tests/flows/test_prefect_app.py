"""The guard in front of Prefect's server: foreign names and foreign pages are turned away, everybody else passes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flows.prefect_app import KnownPlacesOnly, allowed_hosts


def ask(method: str, *, kind: str = "http", **headers: str) -> int:
    """The status of a request through the guard; 200 means that it reached the app behind."""
    sent: list[dict[str, Any]] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": kind, "method": method, "headers": raw, "path": "/api/health"}
    asyncio.run(KnownPlacesOnly(behind, allowed_hosts())(scope, receive, send))
    return 403 if sent[0]["type"] == "websocket.close" else int(sent[0]["status"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:4200", "localhost:4200", "LOCALHOST", "[::1]:4200"])
def test_our_own_names_pass(host: str) -> None:
    assert ask("GET", host=host) == 200


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:4200", "127.0.0.1.evil.example", "localhost.", "["])
def test_foreign_names_do_not(host: str) -> None:
    assert ask("GET", host=host) == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_foreign_page_may_change_nothing(method: str) -> None:
    assert ask(method, host="localhost", origin="http://evil.example") == 403
    assert ask(method, host="localhost", origin="null") == 403
    assert ask(method, host="localhost", origin="http://localhost:4200") == 200
    assert ask(method, host="localhost") == 200, "no browser: the command line and workers send no Origin"


def test_a_foreign_page_may_open_no_web_socket() -> None:
    assert ask("GET", kind="websocket", host="localhost", origin="http://evil.example") == 403
    assert ask("GET", kind="websocket", host="localhost", origin="http://127.0.0.1:4200") == 200


def test_names_of_a_proxy_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_ALLOWED_HOSTS", "prefect, Draft.Example ,")
    assert ask("GET", host="prefect:4200") == 200
    assert ask("POST", host="draft.example", origin="https://draft.example") == 200
    assert ask("GET", host="other.example") == 400
