"""ASGI middleware in front of our servers: checks host names, origins and the password of every request.

Prefect answers any Host, so a page that points its own name at 127.0.0.1 could read the API; it never looks at the
Origin of a request that changes something or opens a web socket. MLflow asks nobody for a password and takes every page
on this machine for a friend. $DRAFTSMITH_ALLOWED_HOSTS adds names, with commas, for a server behind a proxy or in a
container; the host of $DRAFTSMITH_PUBLIC_URL is one of them.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import os
from urllib.parse import urlsplit

from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from flows.services.client import public_url

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
READING = ("GET", "HEAD", "OPTIONS")


def allowed_hosts() -> frozenset[str]:
    """Names under which the server may be called, without port."""
    added = [*os.environ.get("DRAFTSMITH_ALLOWED_HOSTS", "").split(","), urlsplit(public_url()).hostname or ""]
    return frozenset(LOOPBACK) | {name.strip().lower() for name in added if name.strip()}


class KnownPlacesOnly:
    """Refuses a foreign Host with 400, and a change or web socket from a foreign Origin with 403.

    An origin on loopback is known only with the server's own port: other programs of this machine may serve pages too.
    The server behind sees no Origin at all.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] in ("http", "websocket"):
            status, reason = self._verdict(scope, _headers(scope))
            if status:
                await _refuse(scope, receive, send, status, reason)
                return
            # The server then tells the browser of no origin that may read the answer: MLflow would of every local port.
            headers = [item for item in scope["headers"] if item[0].lower() != b"origin"]
            scope = {**scope, "headers": headers}
        await self.app(scope, receive, send)

    def _verdict(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str]:
        """(0, "") for a request that may pass, else the status and the reason."""
        host, origin = headers.get("host", ""), headers.get("origin", "")
        if not _host_is_one_of(f"//{host}", self.hosts):
            return 400, "This server is not called by that name (Host)."
        changes = scope["type"] == "websocket" or scope["method"] not in READING
        if origin and changes and not self._is_own(origin, host):
            return 403, "A page from elsewhere may not do this (Origin)."
        return 0, ""

    def _is_own(self, origin: str, host: str) -> bool:
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            return False
        return netloc.lower() == host.lower() or _host_is_one_of(origin, self.hosts - frozenset(LOOPBACK))


class BehindPassword:
    """Asks for the user name and password (HTTP Basic) before anything but `open_paths`; 401 without them.

    auth_string: "name:password".
    """

    def __init__(self, app: ASGIApp, auth_string: str, open_paths: tuple[str, ...] = ()) -> None:
        self.app, self.auth_string, self.open_paths = app, auth_string, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        asks = scope["type"] in ("http", "websocket") and scope["path"] not in self.open_paths
        if asks and not is_authorised(_headers(scope).get("authorization", ""), self.auth_string):
            await _refuse(scope, receive, send, 401, "This server asks for a name and a password.")
            return
        await self.app(scope, receive, send)


class SignedInByProxy:
    """Prefect's app for people whom a proxy has signed in: its pages ask them for no password.

    The proxy adds the servers' password to what it passes on (deploy/Caddyfile). Prefect's pages would ask for it all
    the same, and send it in the place of the user's own, which the proxy then refuses. So a request that has the
    password and the public host hears that none is needed, and the first message of its web socket gets it.
    """

    def __init__(self, app: ASGIApp, public_url: str, auth_string: str) -> None:
        self.app, self.auth_string = app, auth_string
        self.host = urlsplit(public_url).netloc.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; what it asks or hears of the password is changed."""
        headers = _headers(scope) if scope["type"] in ("http", "websocket") else {}
        is_public = bool(self.host) and headers.get("host", "").lower() == self.host
        if not is_public or not is_authorised(headers.get("authorization", ""), self.auth_string):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self.app(scope, self._with_password(receive), send)
        elif scope["path"] == "/ui-settings":
            await self._tell_settings(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _with_password(self, receive: Receive) -> Receive:
        """Receive as before, with the password in the message that proves who asks."""

        async def receive_with_password() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and message.get("text"):
                try:
                    said = json.loads(message["text"])
                except (ValueError, RecursionError):
                    return message  # Prefect says what is wrong with it
                if isinstance(said, dict) and said.get("type") == "auth":
                    return {**message, "text": json.dumps({**said, "token": self.auth_string})}
            return message

        return receive_with_password

    async def _tell_settings(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, body = 500, b""

        async def keep(message: Message) -> None:
            nonlocal status, body
            status, body = message.get("status", status), body + message.get("body", b"")

        plain = [item for item in scope["headers"] if item[0].lower() != b"accept-encoding"]
        await self.app({**scope, "headers": plain}, receive, keep)
        settings = {**json.loads(body), "auth": None} if status == 200 else {"detail": "Prefect tells no settings."}
        await JSONResponse(settings, status_code=status)(scope, receive, send)


class OwnArtifactsOnly:
    """Refuses with 403 to make an MLflow experiment whose artifacts lie anywhere but in the server's own folder.

    The server reads and writes there for whoever asks, so that `file:///home` would serve a home folder.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http" or not scope["path"].endswith("/mlflow/experiments/create"):
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        try:
            place = json.loads(body or b"{}").get("artifact_location") or ""
        except (ValueError, AttributeError, RecursionError):
            place = ""  # MLflow says what is wrong with it
        if not str(place).startswith("mlflow-artifacts:") and place:
            await _refuse(scope, receive, send, 403, "This server keeps artifacts in its own folder only.")
            return

        async def replay() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)


class OwnConnectionsOnly:
    """Tells the browser that pages of this server ask no other server for anything.

    Prefect's page asks the host of an analytics service for its configuration before it reads the setting that turns
    analytics off, and no setting of its own stops that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; the answer has the rule, unless it has one of its own."""

        async def send_with_rule(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name.lower() == b"content-security-policy" for name, _ in headers):
                    headers.append((b"content-security-policy", b"connect-src 'self' data: blob:"))
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_with_rule if scope["type"] == "http" else send)


def guarded_mlflow(app: ASGIApp, auth_string: str) -> ASGIApp:
    """MLflow's app for known hosts and origins, behind the password; only its health address is open."""
    inner = BehindPassword(OwnArtifactsOnly(app), auth_string, open_paths=("/health",))
    return OwnConnectionsOnly(KnownPlacesOnly(inner, allowed_hosts()))


def is_authorised(header: str, auth_string: str) -> bool:
    """Whether an Authorization header holds this name and password (HTTP Basic)."""
    kind, _, encoded = header.partition(" ")
    try:
        credentials = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return False
    return kind.lower() == "basic" and hmac.compare_digest(credentials, auth_string.encode())


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _host_is_one_of(url: str, hosts: frozenset[str]) -> bool:
    """The URL's host is one of these."""
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return host in hosts or f"[{host}]" in hosts


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await WebSocketClose(code=1008)(scope, receive, send)
        return
    headers = {"WWW-Authenticate": 'Basic realm="Draftsmith", charset="UTF-8"'} if status == 401 else {}
    await PlainTextResponse(reason + "\n", status_code=status, headers=headers)(scope, receive, send)
