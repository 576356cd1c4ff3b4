"""deploy/Caddyfile before the servers of a home: a real Caddy with TLS and one user, and what it must let through."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

from browser import Browser
from served_home import ROOT, free_port
from websockets.sync.client import connect
from websockets.typing import Subprotocol

HOST = "draft.localhost"  # a name that every browser takes for this machine
USER = "ann:garden-gate"
OFFERED = {"Authorization": f"Basic {b64encode(USER.encode()).decode()}"}
FORGIVING = ssl._create_unverified_context()  # an authority of its own, which nobody here knows


def plain(port: int) -> socket.socket:
    """A connection with TLS to the proxy, by its public name."""
    return FORGIVING.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=60), server_hostname=HOST)


def answered(port: int, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and text of one request to the proxy."""
    connection = HTTPConnection(f"{HOST}:{port}")
    connection.sock = plain(port)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


@contextmanager
def behind_caddy(folder: Path, ports: Iterable[int], auth_string: str, port: int) -> Iterator[None]:
    """Caddy as the Caddyfile's head says to start it, for the time of the block; this machine may read.

    ports: of Prefect's and of MLflow's server, whose password is auth_string. port: Caddy's own.
    """
    program = shutil.which("caddy")
    assert program is not None, "no Caddy here: `make test-system` installs it"
    name, password = USER.split(":")
    hashed = subprocess.check_output([program, "hash-password", "--plaintext", password], text=True).strip()
    (folder / "users").write_text(f"{name} {hashed}\n", encoding="utf-8")
    prefect, mlflow = ports
    environment = {
        **os.environ,
        "DRAFTSMITH_PUBLIC_URL": f"https://{HOST}:{port}",
        "DRAFTSMITH_BASIC": b64encode(auth_string.encode()).decode(),
        "DRAFTSMITH_USERS": str(folder / "users"),
        "DRAFTSMITH_READERS": "127.0.0.1/32",
        "DRAFTSMITH_HTTP_PORT": str(free_port()),
        "DRAFTSMITH_PREFECT": f"127.0.0.1:{prefect}",
        "DRAFTSMITH_MLFLOW": f"127.0.0.1:{mlflow}",
        "XDG_DATA_HOME": str(folder / "caddy"),
        "XDG_CONFIG_HOME": str(folder / "caddy"),
    }
    command = [program, "run", "--config", str(ROOT / "deploy" / "Caddyfile")]
    with (folder / "caddy.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline, is_up = time.monotonic() + 60, False
        while not is_up:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "caddy.log").read_text()
            time.sleep(0.1)
            with suppress(OSError):
                is_up = answered(port, "GET", "/mlflow/health")[0] == 401
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def look_from_outside(port: int, folder: Path) -> None:
    """Who has no account may only read two places; who has one gets every page and API, asked for nothing else."""
    readable = {path: answered(port, "GET", path)[0] for path in ("/dashboard/", "/reports/none/")}
    assert readable == {"/dashboard/": 200, "/reports/none/": 404}
    closed = [("GET", path) for path in ("/", "/api/admin/version", "/ui-settings", "/mlflow/", "/mlflow/reports/x/")]
    closed += [
        ("GET", "/api/events/out"),
        ("GET", "/reports/../api/admin/version"),
        ("GET", "/dashboard%2f../api/flows"),
    ]
    closed += [(how, path) for how in ("POST", "DELETE") for path in ("/dashboard/", "/reports/none/")]
    assert {answered(port, how, path)[0] for how, path in closed} == {401}
    assert answered(port, "GET", "/api/admin/version", OFFERED)[0] == 200
    assert answered(port, "GET", "/mlflow/version", OFFERED)[0] == 200
    assert json.loads(answered(port, "GET", "/ui-settings", OFFERED)[1])["auth"] is None
    # a worker elsewhere, which knows its user's password alone
    address, door = f"wss://{HOST}:{port}/api/events/out", socket.create_connection(("127.0.0.1", port))
    protocol = [Subprotocol("prefect")]
    with connect(
        address, sock=door, ssl=FORGIVING, subprotocols=protocol, additional_headers=OFFERED, proxy=None
    ) as events:
        events.send(json.dumps({"type": "auth", "token": USER}))
        assert json.loads(events.recv(timeout=30))["type"] == "auth_success"
    pages = {"/dashboard/": "Draftsmith", "/v2/deployments": "corpus", "/mlflow/#/experiments": "Default"}
    with Browser(folder / "outside") as page:
        page.send("Security.setIgnoreCertificateErrors", ignore=True)
        page.open(f"https://{USER}@{HOST}:{port}/")
        for path, seen in pages.items():
            page.open(f"https://{HOST}:{port}{path}")
            page.wait_for_text(seen)
            page.screenshot(folder / f"outside{path.replace('/', '-').replace('#', '')}.png")
