"""A serving engine is measured as a client sees it: real servers on loopback, the same prompts, every request a row."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from imposing_server import imposing
from serving_engine import free_port, served

from components.bench import measure_server
from components.bench.engines.server import server_prompt, with_draft_key
from components.bench.prompts import EncodedPrompt
from components.bench.settings import EngineServer
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.rows import EngineAcceptance, EngineComparison, Request, Round, read_rows
from components.speedup import compare_engines
from components.targets.load import open_tokenizer

Contexts = Callable[[str], Context]


@pytest.fixture(scope="module")
def transformers_serve(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `transformers serve` with the tiny target."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(target.path)]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with served([*command, *options], tmp_path_factory.mktemp("served") / "log", {"OMP_NUM_THREADS": "1"}):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def measured(
    transformers_serve: str,
    target: Target,
    prompts: Prompts,
    machine: Machine,
    tmp_path_factory: pytest.TempPathFactory,
) -> Measurements:
    folder = tmp_path_factory.mktemp("measured")
    return measure_server(
        target,
        prompts,
        servers=[EngineServer(base_url=f"{transformers_serve}/v1", model=str(target.path))],
        num_prompts=3,
        max_new_tokens=12,
        concurrency=[1, 2],
        num_warm_up=1,
        num_compared=2,
        wait_s=400,
        ctx=Context(key="f" * 64, out=folder, scratch=folder, num_threads=1),
        machine=machine,
    )


def test_every_request_is_a_row_of_the_common_table(measured: Measurements) -> None:
    requests = read_rows(measured.path, Request)
    assert [row.is_warmup for row in requests] == [True] + [False] * 10
    assert {row.status for row in requests} <= {"ok", "eos"} and measured.info["num_failed"] == 0
    for row in requests:
        assert (row.engine, row.method, row.depth_k, row.draft_key) == ("transformers", "none", 0, "")
        assert row.ttft_ns > 0 and row.decode_ns >= 0 and row.ttft_ns + row.decode_ns <= (row.e2e_ns or 0)
        assert row.batch_size == row.concurrency and 1 <= row.tokens_kept <= 12
    timed = [row for row in requests if not row.is_warmup]
    assert {(row.workload, row.concurrency) for row in timed} == {(w, c) for w in ("even", "odd") for c in (1, 2)}
    assert not {row.prompt_id for row in timed} & {row.prompt_id for row in requests if row.is_warmup}
    assert read_rows(measured.path, Round) == [] and read_rows(measured.path, EngineAcceptance) == []


def test_greedy_answers_of_a_server_are_our_own(measured: Measurements) -> None:
    compared = [row for row in read_rows(measured.path, Request) if row.identical is not None]
    assert len(compared) == 2 * 2 * 2 and all(row.identical for row in compared)


def test_a_server_that_is_not_there_is_one_line(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts
) -> None:
    servers = [EngineServer(base_url=f"http://127.0.0.1:{free_port()}")]
    with pytest.raises(UserError, match=r"no answer within 0\.3 s .*start it first") as told:
        measure_server(target, prompts, servers=servers, wait_s=0.3, ctx=context("absent"), machine=machine)
    assert "\n" not in str(told.value)


def test_a_key_that_is_not_set_is_told_by_its_variable(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts
) -> None:
    servers = [EngineServer(base_url="http://127.0.0.1:9", api_key_variable="NO_SUCH_KEY")]
    with pytest.raises(UserError, match="NO_SUCH_KEY is not set"):
        measure_server(target, prompts, servers=servers, ctx=context("key"), machine=machine)


def test_sampled_answers_cannot_be_compared(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts
) -> None:
    servers = [EngineServer(base_url="http://127.0.0.1:9")]
    with pytest.raises(UserError, match="num_compared"):
        measure_server(
            target, prompts, servers=servers, temperature=1.0, num_compared=1, ctx=context("hot"), machine=machine
        )


class Flaky(BaseHTTPRequestHandler):
    """An engine that fails in every way a real one may; a real one cannot be made to fail on cue."""

    protocol_version = "HTTP/1.1"
    ways = ("well", "refuses", "stops", "garbles", "complains")
    asked = 0

    def do_GET(self) -> None:
        found = {"/v1/models": {"data": [{"id": "flaky"}]}, "/openapi.json": {"paths": {}}}.get(self.path)
        self._send(404 if found is None else 200, json.dumps(found).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        way = self.ways[Flaky.asked % len(self.ways)]
        Flaky.asked += 1
        if way == "refuses":
            self._send(503, json.dumps({"error": f"overloaded for {self.headers['Authorization']}"}).encode())
            return
        events: list[Any] = [{"choices": [{"text": "w1\u2028w2"}]}]
        if way == "well":
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            events += [{"choices": [{"text": "", "finish_reason": "length"}], "usage": usage}]
        lines = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
        lines += {"garbles": "data: {nonsense\n\n", "complains": 'data: {"error": "out of memory"}\n\n'}.get(way, "")
        self._send(200, lines.encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of our own."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_failures_are_rows_with_their_reason(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "sk-secret\n")
    with answering(Flaky) as address:
        made = measure_server(
            target,
            prompts,
            servers=[EngineServer(base_url=address, api_key_variable="ENGINE_KEY")],
            num_warm_up=0,
            max_new_tokens=4,
            ctx=context("flaky"),
            machine=machine,
        )
    rows = read_rows(made.path, Request)
    assert made.info["num_failed"] == 4 and len(rows) == 5
    assert [row.status for row in rows] == ["ok"] + ["error"] * 4
    assert rows[0].tokens_kept == 2 and rows[0].engine == "openai"
    assert [(row.error or "")[:24] for row in rows[1:]] == [
        'status 503: {"error": "o',
        "the stream ended before ",
        "not an answer of openai:",
        "out of memory",
    ]
    assert all(row.tokens_kept == 0 and row.e2e_ns for row in rows[1:])
    assert rows[1].error == 'status 503: {"error": "overloaded for Bearer ***"}'


class Cached(Flaky):
    """SGLang's addresses, with a /metrics that is cut off."""

    posted: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, b'vllm:spec_decode_num_drafts_total{engine="0')
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.posted.append(self.path)
        meta = {"prompt_tokens": 3, "completion_tokens": 2, "finish_reason": {"type": "length"}}
        event = {"text": "w1 w2", "output_ids": [4, 5], "meta_info": meta}
        self._send(200, b"" if self.path == "/flush_cache" else f"data: {json.dumps(event)}\n\n".encode())


def test_sglangs_cache_is_emptied_before_each_turn(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts
) -> None:
    with answering(Cached) as address:
        server = EngineServer(base_url=address, engine="sglang")
        options: dict[str, Any] = {"num_warm_up": 1, "max_new_tokens": 4, "machine": machine}
        made = measure_server(target, prompts, servers=[server], ctx=context("cached"), **options)
        turns = "".join(path[1] for path in Cached.posted)
        assert turns in ("fgfgggfgg", "fgfggfggg") and made.info["num_failed"] == 0
        with pytest.raises(UserError, match="two are sglang with method not given"):
            measure_server(target, prompts, servers=[server, server], ctx=context("twice"), **options)


def test_imposed_acceptance_is_held_against_the_speedup_model(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts
) -> None:
    """A round of 9 ms beside plain steps of 6 ms: the server at rate 0 tells the model what a round costs."""
    rates, options = (0.8, 0.6), {"max_new_tokens": 40, "num_warm_up": 0, "reps": 2, "machine": machine}
    with imposing((), 0.006) as plain, imposing((0.0, 0.0), 0.009) as zero, imposing(rates, 0.009) as some:
        servers = [
            EngineServer(base_url=plain, method="none"),
            EngineServer(base_url=zero, imposed=(0.0, 0.0)),
            EngineServer(base_url=some, imposed=rates),
        ]
        made = measure_server(target, prompts, servers=servers, ctx=context("imposed"), **options)  # type: ignore[arg-type]
        otherwise = [EngineServer(base_url=some, imposed=(0.3, 0.1))]
        with pytest.raises(UserError, match=r"accepted 1\.\d+ drafts a round .* and `imposed` says 0\.400"):
            measure_server(target, prompts, servers=otherwise, ctx=context("otherwise"), **options)  # type: ignore[arg-type]
    arms = {(row.method, row.depth_k, row.draft_key) for row in read_rows(made.path, Request)}
    assert arms == {("none", 0, ""), ("imposed 1.00", 2, ""), ("imposed 2.40", 2, "")}
    assert {tuple(row.imposed or ()) for row in read_rows(made.path, EngineAcceptance)} == {(0.0, 0.0), rates}
    compared = compare_engines([made], ctx=context("compared"))
    at_zero, row = (
        next(row for row in read_rows(compared.path, EngineComparison) if row.workload == "all" and row.method == name)
        for name in ("imposed 1.00", "imposed 2.40")
    )
    assert (at_zero.al_pred, at_zero.al_engine, at_zero.speedup_pred, at_zero.verdict) == (
        1.0,
        1.0,
        None,
        "not_compared",
    )
    assert row.al_pred and row.speedup_pred and row.speedup_engine and at_zero.speedup_engine
    assert row.al_engine == pytest.approx(row.al_pred, rel=0.15)
    assert row.speedup_pred == pytest.approx(row.al_pred * at_zero.speedup_engine)
    assert row.speedup_engine == pytest.approx(row.speedup_pred, rel=0.25)


def test_a_timed_prompt_does_not_warm_up(
    target: Target, prompts: Prompts, machine: Machine, context: Contexts, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (prompts.path / "prompts.jsonl").read_text("utf-8").splitlines()]
    tested = [row for row in rows if row["split"] == "test"]
    copies = [{**row, "split": "warm_up", "prompt_id": f"{row['prompt_id']}-again"} for row in tested]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*tested, *copies]), "utf-8")
    both = Prompts(key="c" * 64, path=tmp_path)
    servers = [EngineServer(base_url="http://127.0.0.1:9")]
    with pytest.raises(UserError, match="every warm_up prompt is also a test prompt"):
        measure_server(target, both, servers=servers, ctx=context("warm"), machine=machine)


def test_text_for_a_server_without_ids_encodes_to_the_same_ids(target: Target) -> None:
    tokenizer = open_tokenizer(target)
    ids = [5, 9, 30]
    asked = server_prompt(tokenizer, EncodedPrompt("p", "code", ids))
    assert asked.text is not None and tokenizer(asked.text)["input_ids"] == ids
    assert server_prompt(tokenizer, EncodedPrompt("p", "code", [5, 2, 2, 9])).text != ""


def test_only_servers_of_the_drafter_s_method_that_state_no_key_take_its_key(tmp_path: Path) -> None:
    draft = Draft("d" * 64, tmp_path, {"method": "eagle3"})
    address = "http://127.0.0.1:1/v1"
    named = [EngineServer(base_url=address, method=method) for method in ("eagle3", "none", "ngram", "")]
    named.append(EngineServer(base_url=address, method="eagle3", draft_key="mine"))
    assert [with_draft_key(one, draft).draft_key for one in named] == ["d" * 64, "", "", "", "mine"]
    assert with_draft_key(named[0], None) == named[0]
