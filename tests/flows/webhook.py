"""A receiver of messages: whatever a notification block posts to it is kept, and shown on its page with its links."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

BLOCK = """import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock
form = {"subject": "{{subject}}", "body": "{{body}}"}
CustomWebhookNotificationBlock(name="ops", url=sys.argv[1], json_data=form).save("ops", overwrite=True)
"""
"""A program that makes the block custom-webhook/ops on the server at $PREFECT_API_URL. Its argument: an address."""
PAGE = """<!doctype html><meta charset="utf-8"><title>ops</title>
<style>main {{ font: 16px/1.5 sans-serif; margin: 0 auto; padding: .5rem 1.5rem; max-width: 52rem; color: #222 }}
article {{ border-left: 4px solid #3565c4; margin: 1rem 0; padding: .4rem 1rem; background: #f4f6fa }}
h2 {{ font-size: 1rem; margin: 0 }} p {{ margin: .3rem 0; white-space: pre-wrap; overflow-wrap: anywhere }}</style>
<main>{messages}</main>"""


class Webhook:
    """A web server that somebody's messages go to. received: their subjects and bodies."""

    def __init__(self) -> None:
        received: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(PAGE.format(messages="".join(map(_as_html, received))).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.received, self.server = received, HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def until_heard(self, *wanted: str, within_s: float = 240) -> dict[str, str]:
        """Subject -> body of the first message of each, once these subjects are among them."""
        deadline = time.monotonic() + within_s
        while not {*wanted} <= {one["subject"] for one in self.received} and time.monotonic() < deadline:
            time.sleep(0.1)
        return {one["subject"]: one["body"] for one in reversed(self.received)}


def _as_html(message: dict[str, str]) -> str:
    body = re.sub(r"(https?://\S+)", r'<a href="\1">\1</a>', html.escape(message["body"]))
    return f"<article><h2>{html.escape(message['subject'])}</h2><p>{body}</p></article>"
