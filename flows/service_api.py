"""A client of Prefect's and MLflow's servers over plain HTTP, for a supervisor that must stay small.

Importing Prefect's client costs 130 MB and seconds; asking for health, listing runs and setting a state needs neither.
Every request carries the password, and every change the CSRF token that the server gave to this client.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
import uuid
from datetime import datetime
from typing import Any

TIMEOUT_S = 10.0
TOKEN_LASTS_S = 1800.0  # Prefect's own tokens last an hour
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
            self._headers["Authorization"] = "Basic " + base64.b64encode(auth_string.encode()).decode()
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
        with _open(request, timeout_s) as answer:
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


def _open(request: urllib.request.Request, timeout_s: float) -> Any:
    """Our servers are on loopback: a proxy of the environment must not be asked for them."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=timeout_s)
