"""Another user of this machine, and a page in a browser, ask every server of ours for what an attack needs."""

from __future__ import annotations

import base64
import encodings.idna  # noqa: F401 (the fork cannot read it as another user)
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from served_home import ServedHome, served_home

NOBODY = 65534
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can play another user"),
]
Request = tuple[str, str, dict[str, str], str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHome]:
    with served_home(tmp_path_factory.mktemp("attacked")) as place:
        yield place


def as_nobody(requests: list[Request]) -> list[int]:
    """The statuses that these requests get from a process of another user.

    A fork of this one: another user may be kept from starting our Python.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=become_nobody) as process:
        return list(process.map(status_of, requests))


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def status_of(asked: Request) -> int:
    method, url, headers, body = asked
    assert os.getuid() == NOBODY
    request = urllib.request.Request(url, body.encode() or None, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def for_prefect(api: str) -> list[Request]:
    """What it takes to have a command run: a pool, a flow, a deployment with a command, a scheduled run."""
    sent = {"Content-Type": "application/json"}
    deployment = {"name": "d", "flow_id": "0" * 32, "job_variables": {"command": "touch /tmp/owned"}}
    return [
        ("POST", f"{api}/work_pools/", sent, json.dumps({"name": "foreign", "type": "process"})),
        ("POST", f"{api}/flows/", sent, json.dumps({"name": "foreign"})),
        ("POST", f"{api}/deployments/", sent, json.dumps(deployment)),
        ("POST", f"{api}/flow_runs/filter", sent, "{}"),
        ("GET", f"{api}/admin/settings", {}, ""),
    ]


def for_mlflow(url: str) -> list[Request]:
    """What it takes to put a release of one's own behind the alias champion."""
    sent, api = {"Content-Type": "application/json"}, f"{url}/api/2.0"
    tag = {"name": "builtin", "version": "1", "key": "draftsmith.key", "value": "../mlflow/artifacts/x"}
    alias = {"name": "builtin", "alias": "champion", "version": "1"}
    foreign = {"name": "foreign", "artifact_location": "file:///"}
    return [
        ("PUT", f"{api}/mlflow-artifacts/artifacts/rel/target.json", {}, "{}"),
        ("GET", f"{api}/mlflow-artifacts/artifacts?path=.", {}, ""),
        ("POST", f"{api}/mlflow/experiments/create", sent, json.dumps(foreign)),
        ("POST", f"{api}/mlflow/registered-models/create", sent, json.dumps({"name": "foreign"})),
        ("POST", f"{api}/mlflow/model-versions/set-tag", sent, json.dumps(tag)),
        ("POST", f"{api}/mlflow/registered-models/alias", sent, json.dumps(alias)),
        ("POST", f"{url}/ajax-api/2.0/mlflow/experiments/search", sent, json.dumps({"max_results": 5})),
        ("GET", f"{url}/", {}, ""),
        ("GET", f"{url}/version", {}, ""),
    ]


def with_header(requests: list[Request], **added: str) -> list[Request]:
    return [(method, url, {**headers, **added}, body) for method, url, headers, body in requests]


def test_another_user_without_the_password_gets_nothing_anywhere(place: ServedHome) -> None:
    asked = [*for_prefect(place.services.prefect_api_url), *for_mlflow(place.services.mlflow_url)]
    assert set(as_nobody(asked)) <= {401, 403}  # 403: Prefect misses its own token before it misses the password
    guess = base64.b64encode(b"draftsmith:draftsmith").decode()
    assert set(as_nobody(with_header(asked, Authorization=f"Basic {guess}"))) <= {401, 403}


def test_a_name_that_somebody_points_at_this_machine_gets_no_answer(place: ServedHome) -> None:
    """As a page does it whose own name is made to mean 127.0.0.1; knowing the password would not help it."""
    known = "Basic " + base64.b64encode(place.services.auth_string.encode()).decode()
    asked = [*for_prefect(place.services.prefect_api_url), *for_mlflow(place.services.mlflow_url)]
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:4200"):
        assert set(as_nobody(with_header(asked, Host=host, Authorization=known))) == {400}


def test_a_page_of_another_port_changes_nothing_even_with_the_password_that_a_browser_sends(place: ServedHome) -> None:
    known = "Basic " + base64.b64encode(place.services.auth_string.encode()).decode()
    asked = [*for_prefect(place.services.prefect_api_url), *for_mlflow(place.services.mlflow_url)]
    changes = [request for request in asked if request[0] != "GET"]
    for origin in ("http://evil.example", "http://localhost:9", "http://127.0.0.1:1", "null"):
        assert set(as_nobody(with_header(changes, Origin=origin, Authorization=known))) == {403}


def test_with_the_password_no_experiment_serves_another_folder(place: ServedHome) -> None:
    known = "Basic " + base64.b64encode(place.services.auth_string.encode()).decode()
    create = f"{place.services.mlflow_url}/api/2.0/mlflow/experiments/create"
    sent = {"Content-Type": "application/json", "Authorization": known}
    asked: list[Request] = [
        ("POST", create, sent, json.dumps({"name": f"x{number}", "artifact_location": where}))
        for number, where in enumerate(("file:///", "/etc", "file:/etc", "mlflow-artifacts:/fine"))
    ]
    assert as_nobody(asked) == [403, 403, 403, 200]
    climb = f"{place.services.mlflow_url}/api/2.0/mlflow-artifacts/artifacts/%2e%2e/%2e%2e/prefect/auth"
    assert as_nobody([("GET", climb, {"Authorization": known}, "")])[0] in (400, 403, 404)


def test_nothing_of_all_that_was_made(place: ServedHome) -> None:
    api = place.api
    pools: list[dict[str, Any]] = api.post("/work_pools/filter", {})
    assert "foreign" not in {pool["name"] for pool in pools}
    assert "foreign" not in {flow["name"] for flow in api.post("/flows/filter", {})}
    assert not Path("/tmp/owned").exists()


def test_the_server_of_a_single_run_is_as_closed(tmp_path: Path) -> None:
    """While `draftsmith run` works without `up`, which is when its own server lives."""
    from toy_garden import COMMAND_LINE, GARDEN, ROOT

    file = tmp_path / "pipelines.yaml"
    file.write_text(GARDEN.text)
    environment = {**os.environ, "DRAFTSMITH_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / 'flows'}"
    command = [sys.executable, "-c", COMMAND_LINE, "run", "garden", "-f", str(file), "-p", "pause=3", "-p", "steps=100"]
    work = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        port = port_of_its_server(work)
        assert set(as_nobody(for_prefect(f"http://127.0.0.1:{port}/api"))) == {401}
        sent = with_header(for_prefect(f"http://127.0.0.1:{port}/api"), Host="evil.example")
        assert set(as_nobody(sent)) == {400}
    finally:
        work.send_signal(signal.SIGINT)
        work.communicate(timeout=120)


def port_of_its_server(work: subprocess.Popen[str], within_s: float = 300) -> int:
    """The port on which a child of this command listens, once one does."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and work.poll() is None:
        for child in psutil.Process(work.pid).children(recursive=True):
            try:
                found = [one.laddr.port for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if found and re.search("orchestration/prefect_server", " ".join(child.cmdline())):
                return int(found[0])
        time.sleep(0.1)
    raise AssertionError("no server of its own came up")
