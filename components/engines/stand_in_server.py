"""A server that speaks an engine's protocol and answers nonsense of the right shape, for rehearsals on loopback.

Requests and replies are those of the engine's own address (client.py, bench/engines/connect.py): whole or streamed,
token ids or text, acceptance as that engine reports it. It runs no model; its answers are the same few tokens over and
over, of which a round of DEPTH draft tokens accepts one. A vLLM with a folder for it writes hidden states too
(hidden_states.py): random ones, in the shape that the request expects.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import numpy as np
from safetensors.numpy import save_file

from components.engines.hidden_states import SUFFIX, lock_of
from components.files import locked
from components.outside_json import JsonObject

DEPTH: Final = 2
TOKENS: Final = (5, 6, 7)
"""Ids that every vocabulary has; a text engine says WORD for each."""
WORD: Final = " a"
MODEL: Final = "stand-in"
_FACTS: Final[dict[str, tuple[str, JsonObject]]] = {
    "vllm": ("/version", {"version": "0 (stand-in)"}),
    "sglang": ("/get_server_info", {"version": "0 (stand-in)"}),
    "llama.cpp": ("/props", {"build_info": "0 (stand-in)"}),
}
"""Engine -> the path by which clients tell it, and its reply."""


class StandInServer(ThreadingHTTPServer):
    """Speaks the protocol of `engine`: vllm, sglang, llama.cpp, or openai for all others.

    folder: where it writes hidden states, made when it is missing; None writes none.
    """

    daemon_threads = True

    def __init__(self, engine: str, folder: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine, self.folder = engine, folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.num_rounds = 0  # of all answers, for vLLM's counters

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answered(self, num_tokens: int) -> int:
        """Count the rounds of an answer: behind its first token each emits an accepted draft token and its own."""
        rounds = num_tokens // 2
        self.num_rounds += rounds
        return rounds


@contextmanager
def stand_in_server(engine: str, folder: Path | None = None) -> Iterator[StandInServer]:
    """A running server; it is gone at the end."""
    with StandInServer(engine, folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StandInServer

    def do_GET(self) -> None:
        path, facts = _FACTS.get(self.server.engine, ("", {}))
        if self.path == "/v1/models":
            self._reply({"data": [{"id": MODEL}]})
        elif self.path == path:
            self._reply(facts)
        elif self.path == "/metrics" and self.server.engine == "vllm":
            self._send(_counters(self.server.num_rounds).encode(), "text/plain")
        else:
            self._reply({}, 404)

    def do_POST(self) -> None:
        # SGLang's /flush_cache has no body.
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        limits = (body.get("max_tokens"), body.get("n_predict"), body.get("sampling_params", {}).get("max_new_tokens"))
        count = next((limit for limit in limits if limit is not None), 0)
        prompt = body.get("input_ids", body.get("prompt"))
        whole = _reply_of(self.server.engine, prompt, count, self.server.answered(count))
        expected = (body.get("kv_transfer_params") or {}).get("expected")
        if expected and self.server.folder is not None:
            file = _write_random_states(self.server.folder, prompt, *expected)
            whole["kv_transfer_params"] = {"hidden_states_path": str(file)}
        if not body.get("stream"):
            self._reply(whole)
            return
        events = [json.dumps(event) for event in _streamed(self.server.engine, whole)]
        self._send("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode(), "text/event-stream")

    def _reply(self, content: JsonObject, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the rehearsal's lines are what a user reads."""


def _reply_of(engine: str, prompt: object, count: int, rounds: int) -> JsonObject:
    """The whole reply of an engine to a request of `count` tokens, with its own way to report acceptance."""
    ids, text = [TOKENS[at % len(TOKENS)] for at in range(count)], WORD * count
    length = len(prompt) if isinstance(prompt, list) else 1
    accepted, drafted = max(0, count - 1 - rounds), DEPTH * rounds
    if engine == "sglang":
        counts = {"spec_verify_ct": rounds, "spec_num_correct_drafts": accepted, "spec_num_proposed_drafts": drafted}
        meta = {"completion_tokens": count, "prompt_tokens": length, "finish_reason": {"type": "length"}, **counts}
        return {"text": text, "output_ids": ids, "meta_info": meta}
    if engine == "llama.cpp":
        timings = {"predicted_n": count, "draft_n": drafted, "draft_n_accepted": accepted}
        end = {"stop": True, "stop_type": "limit", "tokens_evaluated": length, "tokens_predicted": count}
        return {"content": text, "tokens": ids, **end, "timings": timings}
    choice: JsonObject = {"text": text, "finish_reason": "length"}
    reply: JsonObject = {"choices": [choice], "usage": {"prompt_tokens": length, "completion_tokens": count}}
    if engine == "vllm":
        choice |= {"token_ids": ids}
        counts = {"num_spec_steps": rounds, "num_draft_tokens": drafted, "num_accepted_draft_tokens": accepted}
        histogram = [rounds - accepted, accepted, *[0] * (DEPTH - 1)]
        reply["metrics"] = {"speculative_decoding": {**counts, "acceptance_histogram": histogram}}
    return reply


def _write_random_states(folder: Path, ids: Sequence[int], num_states: int, hidden_size: int) -> Path:
    """Write random states of these tokens under a lock, as vLLM's connector does, in float16; returns the file."""
    file = folder / f"cmpl-{uuid.uuid4().hex}{SUFFIX}"
    states = np.random.default_rng(len(ids)).standard_normal((len(ids), num_states, hidden_size), dtype=np.float32)
    with locked(lock_of(file)):
        save_file({"hidden_states": states.astype(np.float16), "token_ids": np.array(ids, dtype=np.int64)}, file)
    return file


def _streamed(engine: str, whole: JsonObject) -> Iterator[JsonObject]:
    """The reply in two events: a first token, then the rest (SGLang: all of it again, as it does)."""
    if engine == "sglang":
        meta = {**whole["meta_info"], "completion_tokens": 1, "finish_reason": None}
        yield {"text": WORD, "output_ids": whole["output_ids"][:1], "meta_info": meta}
        yield whole
    elif engine == "llama.cpp":
        yield {"content": WORD, "tokens": whole["tokens"][:1], "stop": False}
        yield {**whole, "content": whole["content"][len(WORD) :], "tokens": whole["tokens"][1:]}
    else:
        choice = whole["choices"][0]
        first, rest = {"text": WORD}, {**choice, "text": choice["text"][len(WORD) :]}
        if engine == "vllm":
            first, rest = (
                {**first, "token_ids": choice["token_ids"][:1]},
                {**rest, "token_ids": choice["token_ids"][1:]},
            )
        yield {"choices": [{**first, "finish_reason": None}]}
        yield {**whole, "choices": [rest]}


def _counters(rounds: int) -> str:
    """vLLM's speculation counters in Prometheus' text format."""
    counts = {"drafts": rounds, "draft_tokens": DEPTH * rounds, "accepted_tokens": rounds}
    lines = []
    for name, count in counts.items():
        full = f"vllm:spec_decode_num_{name}_total"
        lines += [f"# TYPE {full} counter", f"{full} {count}"]
    return "\n".join(lines) + "\n"
