"""A server that speaks vLLM's protocol and imposes acceptance: a round takes its time, dice say what it keeps.

What a real vLLM does with the same options is measured by benchmarks/engine_vllm_synthetic.py.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any


class Imposing(ThreadingHTTPServer):
    """rates: share of rounds that accept draft 1, 2, ...; () decodes plainly. round_s: seconds of a round."""

    def __init__(self, rates: Sequence[float], round_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rates, self.round_s = rates, round_s
        self.dice, self.lock = random.Random(0), Lock()
        self.histogram: Counter[int] = Counter()

    def round(self) -> int:
        """Draft tokens that the next round keeps."""
        with self.lock:
            chance = self.dice.random()
            kept = sum(chance < rate for rate in self.rates)
            self.histogram[kept] += 1
        return kept


class _Handler(BaseHTTPRequestHandler):
    server: Imposing

    def do_GET(self) -> None:
        answers: dict[str, Any] = {"/version": {"version": "0"}, "/v1/models": {"data": [{"id": "m"}]}}
        if self.path == "/metrics" and self.server.rates:
            self._reply(200, _metrics(self.server.histogram, len(self.server.rates)))
        else:
            self._reply(200 if self.path in answers else 404, json.dumps(answers.get(self.path)))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        left, rounds = body["max_tokens"] - 1, list[int]()
        self._reply(200, _event([7]))
        while left:
            time.sleep(self.server.round_s)
            kept = self.server.round()
            rounds.append(kept)
            emitted = min(left, kept + 1)
            left -= emitted
            self._write(_event([7] * emitted, None if left else "length"))
        if self.server.rates:
            depth = len(self.server.rates)
            found = {"num_spec_steps": len(rounds), "num_draft_tokens": depth * len(rounds)}
            found |= {"num_accepted_draft_tokens": sum(rounds)}
            histogram = [rounds.count(kept) for kept in range(depth + 1)]
            told = {"speculative_decoding": {**found, "acceptance_histogram": histogram}}
            self._write("data: " + json.dumps({"choices": [], "metrics": told}) + "\n\n")
        self._write("data: [DONE]\n\n")

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self._write(text)

    def _write(self, text: str) -> None:
        self.wfile.write(text.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def _event(ids: list[int], finish: str | None = None) -> str:
    choice = {"text": "w4 " * len(ids), "token_ids": ids, "finish_reason": finish}
    return "data: " + json.dumps({"choices": [choice]}) + "\n\n"


def _metrics(histogram: Counter[int], depth: int) -> str:
    rounds = sum(histogram.values())
    accepted = sum(kept * count for kept, count in histogram.items())
    counts = {"drafts": rounds, "draft_tokens": depth * rounds, "accepted_tokens": accepted}
    lines = []
    for name, count in counts.items():
        lines += [f"# TYPE vllm:spec_decode_num_{name}_total counter", f"vllm:spec_decode_num_{name}_total {count}.0"]
    return "\n".join(lines) + "\n"


@contextmanager
def imposing(rates: Sequence[float], round_s: float) -> Iterator[str]:
    """The address of such a server."""
    with Imposing(rates, round_s) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
