"""The guard before every server: foreign names, foreign pages and visitors without the password are turned away."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient

from flows.services.server_guard import (
    BehindPassword,
    KnownPlacesOnly,
    OwnArtifactsOnly,
    SignedInByProxy,
    allowed_hosts,
    guarded_mlflow,
)

AUTH = "draftsmith:s3cret:with-colon"


def send_to(app: Any, method: str, path: str, kind: str, body: list[bytes], headers: dict[str, str]) -> int:
    sent: list[dict[str, Any]] = []
    parts = iter(body)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        part = next(parts, b"")
        return {"type": "http.request", "body": part, "more_body": parts.__length_hint__() > 0}

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(app({"type": kind, "method": method, "headers": raw, "path": path}, receive, send))
    return 403 if sent[0]["type"] == "websocket.close" else int(sent[0]["status"])


async def behind(scope: Any, receive: Any, send: Any) -> None:
    """The app behind the guard: it answers 200, and with the size of what it was sent."""
    size, more = 0, scope["type"] == "http"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "size": size})


def ask(method: str, *, kind: str = "http", **headers: str) -> int:
    """The status of a request through the guard of names; 200 means that it reached the app behind."""
    return send_to(KnownPlacesOnly(behind, allowed_hosts()), method, "/api/health", kind, [], headers)


def mlflow(path: str, *body: bytes, method: str = "POST", auth: str = AUTH, **headers: str) -> int:
    """The status of a request to the whole guard of MLflow."""
    basic = "Basic " + base64.b64encode(auth.encode()).decode()
    given = {"host": "127.0.0.1:5000", **({"authorization": basic} if auth else {}), **headers}
    return send_to(guarded_mlflow(behind, AUTH), method, path, "http", list(body), given)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:4200", "localhost:4200", "LOCALHOST", "[::1]:4200"])
def test_our_own_names_pass(host: str) -> None:
    assert ask("GET", host=host) == 200


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:4200", "127.0.0.1.evil.example", "localhost.", "["])
def test_foreign_names_do_not(host: str) -> None:
    assert ask("GET", host=host) == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_a_foreign_page_may_change_nothing(method: str) -> None:
    for origin in ("http://evil.example", "null", "http://[", "http://localhost:9", "http://127.0.0.1:4200"):
        assert ask(method, host="localhost:4200", origin=origin) == 403, origin
    assert ask(method, host="localhost:4200", origin="http://localhost:4200") == 200
    assert ask(method, host="localhost:4200") == 200, "no browser: the command line and workers send no Origin"


def test_a_foreign_page_may_open_no_web_socket() -> None:
    assert ask("GET", kind="websocket", host="127.0.0.1:4200", origin="http://evil.example") == 403
    assert ask("GET", kind="websocket", host="127.0.0.1:4200", origin="http://127.0.0.1:4200") == 200


def test_the_server_behind_names_no_origin_that_may_read() -> None:
    seen: list[list[Any]] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["headers"])
        await send({"type": "http.response.start", "status": 200})

    given = {"host": "localhost:5000", "Origin": "http://localhost:9"}
    assert send_to(KnownPlacesOnly(noting, allowed_hosts()), "GET", "/x", "http", [], given) == 200
    assert seen == [[(b"host", b"localhost:5000")]]


def test_names_of_a_proxy_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_ALLOWED_HOSTS", "prefect, Draft.Example ,")
    assert ask("GET", host="prefect:4200") == 200
    assert ask("POST", host="prefect:4200", origin="https://draft.example") == 200, "the proxy's name, its port gone"
    assert ask("GET", host="other.example") == 400
    monkeypatch.setenv("DRAFTSMITH_PUBLIC_URL", "https://Other.example:8443")
    assert ask("GET", host="other.example") == 200, "where the proxy shows the pages"


@pytest.mark.parametrize(
    "path", ["/", "/version", "/api/2.0/mlflow/runs/search", "/get-artifact", "/health/", "//health"]
)
def test_without_the_password_nothing_but_the_health_is_seen(path: str) -> None:
    assert mlflow(path, method="GET") == 200
    for wrong in ("", "draftsmith:", "draftsmith:s3cret", "x:s3cret:with-colon", AUTH + "x"):
        assert mlflow(path, method="GET", auth=wrong) == 401, wrong
    assert mlflow("/health", method="GET", auth="") == 200


@pytest.mark.parametrize("header", ["Basic", "Basic !!!", "Bearer abc", "basic " + "A" * 9, "\x80"])
def test_a_header_that_is_no_password_is_refused(header: str) -> None:
    app = BehindPassword(behind, AUTH)
    assert send_to(app, "GET", "/", "http", [], {"authorization": header}) == 401
    assert send_to(app, "GET", "/", "websocket", [], {"authorization": header}) == 403


@pytest.mark.parametrize("root", ["/api/2.0/mlflow", "/ajax-api/2.0/mlflow", "/ajax-api/3.0/mlflow"])
def test_artifacts_lie_in_the_servers_own_folder_alone(root: str) -> None:
    create = f"{root}/experiments/create"
    for place in ("file:///home", "/etc", "s3://elsewhere", "../..", "MLFLOW-ARTIFACTS:/"):
        assert mlflow(create, json.dumps({"name": "x", "artifact_location": place}).encode()) == 403, place
    halves = json.dumps({"name": "x", "artifact_location": "file:///home"}).encode()
    assert mlflow(create, halves[:9], halves[9:]) == 403
    for body in ({"name": "x"}, {"name": "x", "artifact_location": ""}, {"artifact_location": "mlflow-artifacts:/7"}):
        assert mlflow(create, json.dumps(body).encode()) == 200
    assert mlflow(create, b"[1") == 200, "MLflow itself says what is wrong with it"


def test_what_passes_arrives_whole() -> None:
    seen: list[int] = []

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        seen.append(len((await receive())["body"]))
        await send({"type": "http.response.start", "status": 200})

    body = json.dumps({"name": "x" * 500}).encode()
    path = "/api/2.0/mlflow/experiments/create"
    assert send_to(OwnArtifactsOnly(counting), "POST", path, "http", [body[:100], body[100:]], {}) == 200
    assert seen == [len(body)]


def test_who_came_through_the_proxy_is_not_asked_again_and_nobody_else_hears_that() -> None:
    async def prefect(websocket: Any) -> None:
        await websocket.accept()
        await websocket.send_json({"token": (await websocket.receive_json()).get("token")})
        await websocket.close()

    settings = {"auth": "BASIC", "api_url": "/api"}
    routes = [Route("/ui-settings", lambda request: JSONResponse(settings)), WebSocketRoute("/out", prefect)]
    pages = TestClient(SignedInByProxy(Starlette(routes=routes), "https://draft.example:8443", AUTH))
    signed_in = {"host": "draft.example:8443", "authorization": "Basic " + base64.b64encode(AUTH.encode()).decode()}
    others = ({**signed_in, "host": "localhost:4200"}, {**signed_in, "authorization": "Basic eDp5"}, {})
    assert pages.get("/ui-settings", headers=signed_in).json() == {**settings, "auth": None}
    assert all(pages.get("/ui-settings", headers=other).json() == settings for other in others)
    for headers, token in ((signed_in, AUTH), *((other, "mine") for other in others)):
        with pages.websocket_connect("/out", headers=headers) as socket:
            socket.send_json({"type": "auth", "token": "mine"})
            assert socket.receive_json() == {"token": token}
