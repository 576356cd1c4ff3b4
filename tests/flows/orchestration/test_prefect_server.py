"""Prefect's server: whose is taken, and a temporary one that ends with its run."""

from __future__ import annotations

import base64
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prefect_server import temporary_server

from flows.orchestration import prefect_server
from flows.orchestration.prefect_server import TemporaryServer, answers
from flows.services.client import QUIET


@pytest.fixture(autouse=True)
def no_prefect_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    for name in (*QUIET, "PREFECT_HOME", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)


def test_without_a_server_prefect_is_quiet_and_lives_in_our_home(tmp_path: Path) -> None:
    assert prefect_server.prepare(tmp_path) == ""
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect") and (tmp_path / "prefect").is_dir()
    assert all(os.environ[name] == value for name, value in QUIET.items())


def test_a_server_that_is_named_and_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setattr(prefect_server, "answers", lambda url: True)
    assert prefect_server.prepare(tmp_path) == "http://127.0.0.1:4200/api"
    with prefect_server.prefect_server(tmp_path) as server:
        assert server is None, "a server that is there is not started again"


def test_a_server_that_is_named_and_silent_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:9/api")
    assert prefect_server.prepare(tmp_path) == ""
    told = capsys.readouterr().err
    assert "taking a temporary one" in told and "secret" not in told


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryServer]:
    with temporary_server(tmp_path_factory.mktemp("prefect")) as started:
        yield started


def asked(server: TemporaryServer, path: str, *, knows: bool, method: str = "POST", **headers: str) -> int:
    """The status of an answer to somebody who knows the password, or does not."""
    if knows:
        password = server.client_environment["PREFECT_API_AUTH_STRING"].encode()
        headers["Authorization"] = f"Basic {base64.b64encode(password).decode()}"
    body = json.dumps({"name": "foreign", "type": "process"}).encode() if method == "POST" else None
    request = urllib.request.Request(f"{server.url}{path}", body, headers, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.headers.get("access-control-allow-origin") != "*"
            return int(answer.status)
    except urllib.error.HTTPError as error:
        assert error.headers.get("access-control-allow-origin") != "*"
        return error.code


@pytest.mark.timeout(1800)
def test_it_asks_for_the_password_that_only_its_run_knows(server: TemporaryServer) -> None:
    for path in ("/work_pools/", "/flows/", "/deployments/"):
        assert asked(server, path, knows=False) == 401
    assert asked(server, "/work_pools/filter", knows=True) in (200, 422)
    assert asked(server, "/admin/version", knows=False, method="GET") == 401


@pytest.mark.timeout(1800)
def test_it_is_called_by_its_own_name_and_from_its_own_pages_alone(server: TemporaryServer) -> None:
    for knows in (True, False):
        assert asked(server, "/work_pools/", knows=knows, Host="evil.example:80") == 400
        assert asked(server, "/work_pools/", knows=knows, Origin="http://evil.example") == 403
        assert asked(server, "/admin/version", knows=knows, method="GET", Host="evil.example") == 400


@pytest.mark.timeout(1800)
def test_a_page_from_elsewhere_is_not_told_that_it_may_ask(server: TemporaryServer) -> None:
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert asked(server, "/work_pools/", knows=False, method="OPTIONS", **preflight) in (400, 401, 403)


def test_nobody_answers_on_a_dead_port_or_at_nonsense():
    assert not answers("http://127.0.0.1:9/api") and not answers("nonsense")


class _Health(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked += 1
        if server.asked <= server.busy:
            server.over.wait(30)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


@pytest.mark.parametrize(("busy", "found"), [(0, True), (2, True), (9, False)])
def test_a_server_that_is_busy_for_a_moment_is_there(busy, found, monkeypatch):
    monkeypatch.setattr("flows.orchestration.prefect_server.ANSWERS_WITHIN_S", 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        server.busy, server.asked, server.over = busy, 0, threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert answers(f"http://127.0.0.1:{server.server_port}/api") is found
        assert server.asked == min(busy + 1, 3)
        server.over.set()
        server.shutdown()
