"""The small client of Prefect's API: a busy server is asked again, any other refusal is told at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows.services.client import ApiError, PrefectApi


@contextmanager
def a_server(*answers: int) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers, the last for ever; its address and the requests that it got."""
    left, got = list(answers), []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b'{"token": "t", "id": "7"}'
            self.send_response(200 if "csrf" in self.path else left.pop(0) if len(left) > 1 else left[0])
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            """Nothing on the screen."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_busy_server_is_asked_again() -> None:
    with a_server(503, 503, 200) as (url, got):
        assert PrefectApi(url).post("/runs", {})["id"] == "7"
    assert got[1:] == ["POST /runs"] * 3


@pytest.mark.parametrize(("status", "busy_for_s"), [(503, 0.0), (409, 60.0), (500, 60.0)])
def test_any_other_refusal_is_told_at_once_and_so_is_a_busy_server_to_who_does_not_wait(
    status: int, busy_for_s: float
) -> None:
    with a_server(status) as (url, got), pytest.raises(ApiError, match=f"answered {status}"):
        PrefectApi(url, busy_for_s=busy_for_s).get("/runs")
    assert got == ["GET /runs"]
