"""A real HTTP server that answers like an engine and misbehaves as told, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "tiny"


class AnsweringServer(ThreadingHTTPServer):
    """Answers prompt ids p with `answer(p)`, and in the reply `beside(p)`, within its limit of tokens.

    mood(p, attempt) says how attempt 1, 2, ... at a prompt goes.
    """

    daemon_threads = True

    def __init__(self, answer: Callable[[tuple[int, ...]], dict[str, Any]], engine: str = "vllm") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.engine = answer, engine
        self.beside: Callable[[tuple[int, ...]], dict[str, Any]] = lambda prompt: {}
        self.limit: int | None = None
        self.mood: Callable[[Any, int], str] = lambda prompt, attempt: "well"
        self.attempts: Counter[Any] = Counter()
        self.answered: Counter[Any] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.in_flight = self.most_in_flight = 0
        self.open = 0
        self.over = threading.Event()
        self.lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.open += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self.lock:
            self.open -= 1

    def settle(self) -> None:
        """Return once every connection made so far has been served to its end: they are accepted in their order."""
        urllib.request.urlopen(f"{self.url}/models").close()
        while self.open:
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextlib.contextmanager
def answering(server: AnsweringServer) -> Iterator[AnsweringServer]:
    """Serve in a thread; hanging requests are let go at the end."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: AnsweringServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, {"data": [{"id": MODEL, "max_model_len": self.server.limit}]})
        elif self.path == "/version" and self.server.engine == "vllm":
            self._reply(200, {"version": "0.0"})
        else:
            self._reply(404, {})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = tuple(body["prompt"]) if isinstance(body["prompt"], list) else body["prompt"]
        with server.lock:
            server.bodies.append(body)
            server.headers.append(self.headers.get("Authorization", ""))
            server.attempts[prompt] += 1
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            mood = server.mood(prompt, server.attempts[prompt])
        try:
            self._act(mood, prompt)
        finally:
            with server.lock:
                server.in_flight -= 1

    def _act(self, mood: str, prompt: Any) -> None:
        if mood == "well":
            with self.server.lock:
                self.server.answered[prompt] += 1
            self._reply(200, {"choices": [self.server.answer(prompt)], **self.server.beside(prompt)})
        elif mood == "hangs":
            self.server.over.wait()
            self.close_connection = True
        elif mood == "cut off":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif mood == "garbage":
            self._send(200, b"\xff\x00{nonsense")
        elif mood == "nested":
            self._send(200, b"[" * 100_000)
        elif mood.startswith("says "):
            self._send(200, mood.removeprefix("says ").encode())
        else:
            status, _, retry_after = mood.partition(" ")
            headers = {"Retry-After": retry_after} if retry_after else {}
            self._reply(int(status), {"error": "the key is " + self.headers.get("Authorization", "none")}, headers)

    def _reply(self, status: int, said: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(said).encode(), headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has given up
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""
