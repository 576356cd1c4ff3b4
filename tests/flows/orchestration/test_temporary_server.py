"""The server of one run answers its run alone: whoever else may reach the port learns nothing and changes nothing."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from flows.orchestration.temporary_server import TemporaryServer, temporary_server
from flows.services.client import QUIET


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryServer]:
    place = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PREFECT_HOME": str(place)}.items():
            patch.setenv(name, value)
        with temporary_server(place) as started:
            started.wait()
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


@pytest.mark.timeout(600)
def test_it_asks_for_the_password_that_only_its_run_knows(server: TemporaryServer) -> None:
    for path in ("/work_pools/", "/flows/", "/deployments/"):
        assert asked(server, path, knows=False) == 401
    assert asked(server, "/work_pools/filter", knows=True) in (200, 422)
    assert asked(server, "/admin/version", knows=False, method="GET") == 401


@pytest.mark.timeout(600)
def test_it_is_called_by_its_own_name_and_from_its_own_pages_alone(server: TemporaryServer) -> None:
    for knows in (True, False):
        assert asked(server, "/work_pools/", knows=knows, Host="evil.example:80") == 400
        assert asked(server, "/work_pools/", knows=knows, Origin="http://evil.example") == 403
        assert asked(server, "/admin/version", knows=knows, method="GET", Host="evil.example") == 400


@pytest.mark.timeout(600)
def test_a_page_from_elsewhere_is_not_told_that_it_may_ask(server: TemporaryServer) -> None:
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    assert asked(server, "/work_pools/", knows=False, method="OPTIONS", **preflight) in (400, 401, 403)
