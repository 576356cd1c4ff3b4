"""What engines report is read as counts of one convention; the samples are answers of the real engines, shortened."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from components.bench.engines.acceptance import Acceptance, Counters, at_least_counts, read_acceptance, read_counters
from components.bench.engines.connect import Answer, Connected, ServerPrompt, _add_chunk, request_body
from components.bench.engines.rows import EngineRows, EngineSession, round_rows
from components.bench.engines.server import Turn, TurnResult
from components.bench.settings import EngineServer
from components.contract import UserError
from components.definitions import has_decoding, tokens_per_s

# vLLM 0.32.0, eagle3 with three guesses, --per-request-spec-decode-metrics detailed.
VLLM = {
    "mean_acceptance_length": 3.0,
    "draft_acceptance_rate": 0.6666666666666666,
    "acceptance_histogram": [0, 0, 1, 0],
    "num_spec_steps": 1,
    "num_accepted_draft_tokens": 2,
    "num_draft_tokens": 3,
    "num_spec_tokens": 3,
    "per_step_accepted": [2],
    "per_step_drafted": [3],
}
VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="builtin"} %d.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="builtin"} 1.7952437735339074e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="builtin"} %d.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="builtin"} %d.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="builtin",position="0"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="builtin",position="1"} %d.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="builtin",position="2"} %d.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="builtin"} 0.0
"""
# llama-server 0.5.0, draft-eagle3 with three guesses.
LLAMA_CPP = {"prompt_n": 199, "prompt_ms": 210.1, "predicted_n": 48, "predicted_ms": 489.1}


def connected(engine: Any) -> Connected:
    return Connected(EngineServer(base_url="http://127.0.0.1:8000/v1"), engine, "1", "m")


def test_vllm_tells_every_round() -> None:
    told = {"choices": [], "usage": {}, "metrics": {"speculative_decoding": VLLM}}
    assert read_acceptance(told) == Acceptance(1, 3, 2, [1, 1, 0], [(3, 2)])
    summary = {name: value for name, value in VLLM.items() if not name.startswith("per_step")}
    assert read_acceptance({"metrics": {"speculative_decoding": summary}}) == Acceptance(1, 3, 2, [1, 1, 0])
    assert read_acceptance({"choices": [{"text": "a"}], "metrics": None}) is None


def test_sglang_names_without_the_bonus_are_read_and_older_ones_are_not() -> None:
    meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 7, "spec_num_proposed_drafts": 30}
    assert read_acceptance({"meta_info": meta}) == Acceptance(10, 30, 7)
    told = {"meta_info": {**meta, "spec_accept_histogram": [5, 3, 2]}}
    assert read_acceptance(told) == Acceptance(10, 30, 7, [5, 2])
    assert read_acceptance({"choices": [{"meta_info": meta}]}) == Acceptance(10, 30, 7)
    assert read_acceptance({"meta_info": {"spec_verify_ct": 10, "spec_accept_token_num": 17}}) is None


def test_llama_cpp_rounds_follow_from_its_counts() -> None:
    drafted = {**LLAMA_CPP, "draft_n": 87, "draft_n_accepted": 17}
    assert read_acceptance({"timings": drafted}) == Acceptance(30, 87, 17)
    assert read_acceptance({"timings": LLAMA_CPP}) is None


def test_histograms_become_counts_by_position() -> None:
    assert at_least_counts([191, 52, 13, 11]) == [76, 24, 11]
    assert at_least_counts([4]) == []


def test_prometheus_counters_are_differences() -> None:
    before, after = (
        read_counters(VLLM_METRICS % counts) for counts in ((1, 3, 2, 1, 1, 0), (268, 804, 113, 77, 25, 11))
    )
    assert before is not None and after is not None
    assert after.since(before) == Acceptance(267, 801, 111, [76, 24, 11])
    with pytest.raises(ValueError, match="restarted"):
        before.since(after)


def test_several_engines_of_one_server_are_summed() -> None:
    one = VLLM_METRICS % (1, 3, 2, 1, 1, 0)
    other = "\n".join(line.replace('engine="0"', 'engine="1"') for line in one.splitlines() if line[:1] != "#")
    text = "\n".join(line for pair in zip(one.splitlines(), [""] * 99, strict=False) for line in pair) + "\n" + other
    assert read_counters(text + "\n") == Counters(2, 6, 4, {0: 2, 1: 2, 2: 0})


def test_a_server_without_speculation_has_no_counters() -> None:
    assert read_counters("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0.0\n") is None


@pytest.mark.parametrize(
    ("engine", "address", "field"),
    [
        ("vllm", "/v1/completions", "prompt"),
        ("sglang", "/generate", "input_ids"),
        ("llama.cpp", "/completion", "prompt"),
    ],
)
def test_engines_that_take_ids_get_ids(engine: str, address: str, field: str) -> None:
    asked = ServerPrompt("p", "code", [7, 8], "text")
    place, body = request_body(connected(engine), asked, 16, 0.0)
    assert place == f"http://127.0.0.1:8000{address}" and body[field] == [7, 8] and body["stream"] is True
    assert request_body(connected("openai"), asked, 16, 0.0)[1]["prompt"] == "text"


def test_sglang_chunks_hold_all_so_far_or_only_what_is_new() -> None:
    finish = {"type": "length", "length": 3}
    counts = {"spec_verify_ct": 1, "spec_num_correct_drafts": 1, "spec_num_proposed_drafts": 3}
    for whole in (True, False):
        answer = Answer(sent_ns=0)
        first = {"text": "a", "output_ids": [4], "meta_info": {"prompt_tokens": 2, "completion_tokens": 1}}
        meta = {"prompt_tokens": 2, "completion_tokens": 3, "finish_reason": finish, **counts}
        ids, text = ([4, 5, 6], "abc") if whole else ([5, 6], "bc")
        _add_chunk(answer, first, 10)
        _add_chunk(answer, {"text": text, "output_ids": ids, "meta_info": meta}, 20)
        assert (answer.tokens, answer.text, answer.chunk_tokens) == ([4, 5, 6], "abc", [1, 2])
        assert (answer.first_ns, answer.last_ns, answer.finish_reason) == (10, 20, "length")
        assert answer.acceptance == Acceptance(1, 3, 1)


def test_rounds_are_placed_only_where_their_places_are_certain() -> None:
    asked = ServerPrompt("p", "code", [1] * 10, None)
    answer = Answer(sent_ns=0, tokens=[0] * 6, chunk_tokens=[1, 3, 2])
    answer.acceptance = Acceptance(2, 6, 3, [2, 1, 0], [(3, 2), (3, 1)])
    rows = [(row.out_pos, row.accepted, row.emitted, row.kv_len) for row in round_rows("r", asked, answer, 6)]
    assert rows == [(0, 2, 3, 10), (3, 1, 2, 13)]
    cut = dataclasses.replace(answer, chunk_tokens=[1, 3, 1], tokens=[0] * 5)  # the limit fell within the last round
    assert [row.emitted for row in round_rows("r", asked, cut, 5)] == [3, 1]
    undrafted = dataclasses.replace(answer, chunk_tokens=[1, 1, 3, 2])  # a round without guesses: nobody knows which
    joined = dataclasses.replace(answer, chunk_tokens=[1, 5])  # two rounds in one chunk
    assert round_rows("r", asked, undrafted, 7) == round_rows("r", asked, joined, 6) == []


ASKED = ServerPrompt("p", "code", [1, 2, 3], None)


def turn_of(server: Connected, *told: Acceptance | None, chunks: Sequence[int] = (1, 2)) -> TurnResult:
    """A turn of 8 ms after the first chunk for each answer."""
    answers = [
        Answer(
            sent_ns=0,
            first_ns=1_000_000,
            last_ns=9_000_000,
            end_ns=9_000_000,
            tokens=[7] * sum(chunks),
            chunk_tokens=list(chunks),
            finish_reason="length",
            acceptance=one,
        )
        for one in told
    ]
    return TurnResult(Turn(server, "code", 1, 0, False, [ASKED] * len(told)), answers, None)


def rows_of(*taken: TurnResult) -> EngineRows:
    return EngineSession("s", "t", "float32", 0.0).rows(taken, None, None)


def test_a_server_that_drafted_nothing_in_one_turn_is_no_plain_server() -> None:
    drafted, quiet = Acceptance(2, 6, 3, [2, 1, 0]), Acceptance(0, 0, 0, [])
    rows = rows_of(turn_of(connected("vllm"), drafted), turn_of(connected("vllm"), quiet, None))
    assert {(row.method, row.depth_k) for row in rows.requests} == {("external", 3)}
    assert {(row.method, row.depth_k) for row in rows.acceptance} == {("external", 3)}
    assert {(row.method, row.depth_k) for row in rows_of(turn_of(connected("vllm"), None)).requests} == {("none", 0)}


def test_two_servers_that_cannot_be_told_apart_are_refused() -> None:
    here, there = (
        Connected(EngineServer(base_url=f"http://127.0.0.1:{port}", method="mtp"), "vllm", "1", "m")
        for port in (8000, 8001)
    )
    drafted, deeper = Acceptance(2, 6, 3, [2, 1, 0]), Acceptance(2, 8, 3, [2, 1, 0, 0])
    with pytest.raises(UserError, match="two are vllm 1 with method mtp, depth_k 3"):
        rows_of(turn_of(here, drafted), turn_of(there, drafted))
    rows = rows_of(turn_of(here, drafted), turn_of(there, deeper))
    assert [row.depth_k for row in rows.requests] == [3, 4]


def test_histograms_of_different_length_are_summed() -> None:
    told = [Acceptance(3, 9, 1, [1]), Acceptance(2, 6, 5, [2, 2, 1])]
    (counted,) = rows_of(turn_of(connected("sglang"), *told)).acceptance
    assert (counted.accepted_per_position, counted.depth_k) == ([3, 2, 1], 3)
    shallow = rows_of(turn_of(connected("sglang"), Acceptance(3, 9, 1, [1])))  # it saw no more than one accepted
    assert shallow.acceptance[0].depth_k == 3


def test_tokens_that_came_with_the_first_are_in_no_rate() -> None:
    rows = rows_of(turn_of(connected("vllm"), None, chunks=[4, 2, 2]))
    assert rows.summary()[0]["tpot_ms_p50"] == 2.0
    assert has_decoding(rows.requests[0]) and tokens_per_s(rows.requests) == 500.0
    at_once = rows_of(turn_of(connected("vllm"), None, chunks=[4]))
    assert at_once.summary()[0]["tpot_ms_p50"] is None and not has_decoding(at_once.requests[0])


def test_no_request_finds_another_ones_prompt_in_vllms_cache() -> None:
    salts = {request_body(connected("vllm"), ASKED, 16, 0.0)[1]["cache_salt"] for _ in range(3)}
    assert len(salts) == 3 and all(salts)


@pytest.mark.parametrize("held", ["sk-secret\n", "  sk-secret\r\n"])
def test_a_key_is_sent_without_the_line_feed_its_file_ends_on(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", held)
    server = EngineServer(base_url="http://127.0.0.1:8000", api_key_variable="ENGINE_KEY")
    assert server.headers() == {"Authorization": "Bearer sk-secret"}
    assert server.without_key("x" * 295 + "sk-secret") == "x" * 295 + "***"


@pytest.mark.parametrize("held", ["sk-se\ncret", "sk-secr\u00e9t", "sk-\x7fsecret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", held)
    with pytest.raises(UserError, match="ENGINE_KEY is no key: only printable ASCII") as told:
        EngineServer(base_url="http://127.0.0.1:8000", api_key_variable="ENGINE_KEY").headers()
    assert "sk-" not in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("address", ["http://me:secret@host:1", "http://host?key=1", "http://host/v1#a", "http://a b/"])
def test_an_address_holds_no_credentials(address: str) -> None:
    with pytest.raises(ValidationError, match="base_url"):
        EngineServer(base_url=address)
    assert EngineServer(base_url="https://host:8000/base/v1/").root == "https://host:8000/base"
