"""A client of Prefect's and MLflow's servers over plain HTTP, for a supervisor that must stay small.

Importing Prefect's client costs 130 MB and seconds; asking for health, listing runs and setting a state needs neither.
Every request carries the password, and every change the CSRF token that the server gave to this client.

The addresses and the password of the servers of `draftsmith up`, for their clients.

The supervisor writes `home/services.json` and holds a lock on `home/services.pid` for as long as it lives, so the file
of a killed supervisor is never believed. The password stands alone in `home/prefect/auth`, which only
its owner may read. Neither Prefect nor MLflow is imported here, since every command may ask.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from components.contract import UserError
from components.files import locked, write_whole
from components.outside_json import read_object
from storage.artifacts.remote import VARIABLE as STORE

TIMEOUT_S = 10.0
TOKEN_LASTS_S = 1800.0  # Prefect's own tokens last an hour
NEWER_PAGES = "/v2"  # where Prefect's server has its newer pages, which show the cards of a run
BUSY = 503  # Prefect's answer while another request holds its SQLite database; nothing was changed


class ApiError(Exception):
    """The server could not be reached or refused; `status` is 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class PrefectApi:
    """One client of Prefect's REST API. Not for use by several threads at once.

    busy_for_s: how long it repeats a request to a server that is busy, as Prefect's own client does.
    """

    def __init__(self, url: str, auth_string: str = "", busy_for_s: float = 60.0) -> None:
        self.url, self.busy_for_s = url.rstrip("/"), busy_for_s
        self._headers = {"Content-Type": "application/json"}
        if auth_string:
            self._headers |= _basic(auth_string)
        self._client = str(uuid.uuid4())
        self._token, self._token_until = "", 0.0

    def get(self, path: str) -> Any:
        """Send a GET request; returns the JSON of the response.

        Raises:
            ApiError: no answer, or an answer that is no success.
        """
        return self._fetch(path, headers=self._headers)

    def post(self, path: str, body: Any) -> Any:
        """Send a POST request; returns the JSON of the response. Raises like `get`."""
        if time.monotonic() > self._token_until:
            self._renew_token()
        headers = {**self._headers, "Prefect-Csrf-Client": self._client, "Prefect-Csrf-Token": self._token}
        try:
            return self._fetch(path, body=body, headers=headers)
        except ApiError as error:
            if error.status == 403:  # the server was restarted with a new database, or the token is too old
                self._token_until = 0.0
            raise

    def _renew_token(self) -> None:
        try:
            self._token = str(self.get(f"/csrf-token?client={self._client}")["token"])
        except ApiError as error:
            if error.status != 422:  # 422: this server has its CSRF protection switched off
                raise
        self._token_until = time.monotonic() + TOKEN_LASTS_S

    def _fetch(self, path: str, *, headers: dict[str, str], body: Any = None) -> Any:
        deadline = time.monotonic() + self.busy_for_s
        while True:
            try:
                return fetch(self.url + path, body=body, headers=headers)
            except ApiError as error:
                if error.status != BUSY or time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)


def fetch(url: str, *, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Any:
    """Send one request; returns the JSON of the response, None for an empty one.

    Raises:
        ApiError: no answer, or an answer that is no success.
    """
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers=headers or {})
    try:
        # our servers are on loopback: a proxy of the environment must not be asked for them
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        message = error.read(300).decode(errors="replace")
        raise ApiError(f"{url} answered {error.code}: {message}", error.code) from None
    except (OSError, ValueError) as error:
        raise ApiError(f"{url}: {error}") from None
    try:
        return json.loads(content) if content else None
    except ValueError:
        return content.decode(errors="replace")


def healthy(url: str) -> bool:
    """Whether the server answers at its health address."""
    try:
        fetch(url, timeout_s=5.0)
    except ApiError:
        return False
    return True


def worker_is_online(api: PrefectApi, pool: str, name: str = "", since: float = 0.0) -> bool:
    """Whether a worker of this pool (the one of this name) is online, and was heard after `since` (seconds since 1970).

    Raises:
        ApiError: Prefect does not answer, or knows no such pool yet.
    """
    for worker in api.post(f"/work_pools/{pool}/workers/filter", {}):
        heard = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
        if worker["status"] == "ONLINE" and name in ("", worker["name"]) and heard > since:
            return True
    return False


LOOPBACK = "127.0.0.1"
PASSWORD_VARIABLE = "DRAFTSMITH_MLFLOW_AUTH_STRING"  # how MLflow's server gets the password
MLFLOW_PAGES = "DRAFTSMITH_MLFLOW_UI_URL"  # of our server in a container, whose own name people's browsers do not know
WORK_POOL = "draftsmith"
OWNER_ONLY = 0o600  # the mode of files with addresses or passwords
HEARTBEAT_S = 30  # between two signs of life of a flow run of ours; Prefect takes no less
PREFECTS_HEARTBEAT_S = 180  # of anybody else's
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
}


@dataclass(frozen=True)
class Services:
    """The servers of one home while they run."""

    prefect_api_url: str
    prefect_ui_url: str
    mlflow_url: str
    auth_string: str  # "name:password" of both servers; "" for none
    work_pool: str
    pid: int  # of the supervisor
    tracking_uri: str = ""  # what runs must log to when MLflow does not stand on the home's own database
    mlflow_is_ours: bool = True  # else another server runs it, which must not see our password
    public_url: str = ""  # where a proxy shows all pages under one host (deploy/Caddyfile); "" without one

    @property
    def pages(self) -> str:
        """Where people reach Prefect's server, which has the dashboard too."""
        return self.public_url or self.prefect_ui_url

    @property
    def prefect_pages(self) -> str:
        """Prefect's newer pages as people reach them."""
        return self.pages + NEWER_PAGES

    @property
    def mlflow_pages(self) -> str:
        """MLflow's pages as people reach them."""
        return f"{self.public_url}/mlflow" if self.public_url and self.mlflow_is_ours else self.mlflow_url.rstrip("/")


def running(home: Path) -> Services | None:
    """The servers that `draftsmith up` runs on this home; None when it does not run.

    Raises:
        UserError: they run, and the file with their addresses cannot be read.
    """
    if not is_held(pid_file(home)):
        return None
    try:
        addresses = read_object(address_file(home))
    except UserError:
        if not address_file(home).exists():
            return None  # it is just starting, or just leaving
        raise
    try:
        return Services(**addresses, auth_string=read_auth_string(home))
    except TypeError as error:
        raise UserError(
            f"{address_file(home)}: is not as the supervisor wrote it ({error}); draftsmith down, then draftsmith up"
        ) from error


def mlflow_address(home: Path) -> str:
    """MLflow's pages as people reach them: of `draftsmith up`, or where the environment of a worker elsewhere says; ""
    where nothing serves them."""
    services = running(home)
    if services is not None:
        uri = services.mlflow_pages
    elif public_url():
        uri = f"{public_url()}/mlflow"
    else:
        uri = os.environ.get(MLFLOW_PAGES) or os.environ.get("MLFLOW_TRACKING_URI", "")
    return uri.rstrip("/") if uri.startswith(("http://", "https://")) else ""


def report_address(home: Path, key: str) -> str:
    """The address of a report on MLflow's server (flows/services/report_pages.py): of `draftsmith up`, or of the one
    elsewhere that has the same shared store; "" without one."""
    services = running(home)
    if services is not None:
        place = (services.public_url or services.mlflow_url) if services.mlflow_is_ours else ""
    else:
        place = (public_url() or os.environ.get(MLFLOW_PAGES, "")) if os.environ.get(STORE) else ""
    return f"{place.rstrip('/')}/reports/{key}/" if place else ""


def public_url() -> str:
    """Where a proxy shows all pages under one host (deploy/Caddyfile), as the environment says; "" without one."""
    return os.environ.get("DRAFTSMITH_PUBLIC_URL", "").rstrip("/")


def client_environment(services: Services) -> dict[str, str]:
    """The environment variables that a client of these servers needs."""
    environment = {
        "PREFECT_API_URL": services.prefect_api_url,
        "PREFECT_UI_URL": services.prefect_pages,  # in links
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": QUIET["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"],
    }
    if services.auth_string:
        environment["PREFECT_API_AUTH_STRING"] = services.auth_string
    if services.tracking_uri:
        environment["MLFLOW_TRACKING_URI"] = services.tracking_uri
        name, _, password = services.auth_string.partition(":")
        environment |= {"MLFLOW_TRACKING_USERNAME": name, "MLFLOW_TRACKING_PASSWORD": password}
    return environment


def mlflow_headers(services: Services) -> dict[str, str]:
    """The headers that a request to MLflow's server needs."""
    if not services.auth_string or not services.mlflow_is_ours:
        return {}
    return _basic(services.auth_string)


def _basic(auth_string: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(auth_string.encode()).decode()}"}


def write_address(home: Path, services: Services) -> None:
    """Write the addresses into `services.json`; a reader sees the whole file or none."""
    public = {name: value for name, value in dataclasses.asdict(services).items() if name != "auth_string"}
    write_whole(address_file(home), json.dumps(public, indent=2) + "\n", mode=OWNER_ONLY)


def address_file(home: Path) -> Path:
    """The file with the addresses, as JSON without the password."""
    return home / "services.json"


def pid_file(home: Path) -> Path:
    """The file with the supervisor's process id, locked while it lives, so that two never run on one home."""
    return home / "services.pid"


def auth_file(home: Path) -> Path:
    """The file with the password of both servers, "name:password", of mode 0600; it stays from one `up` to the next."""
    return home / "prefect" / "auth"


def read_auth_string(home: Path) -> str:
    """The password of this home's servers; "" when there is none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return auth_file(home).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise UserError(
            f"{auth_file(home)}: is no password ({type(error).__name__}); remove it: draftsmith up makes another"
        ) from error


def is_held(lock: Path) -> bool:
    """Whether a living process holds this lock."""
    try:
        with locked(lock, shared=True, wait=False, mode="r") as is_free:
            return not is_free
    except FileNotFoundError:
        return False
