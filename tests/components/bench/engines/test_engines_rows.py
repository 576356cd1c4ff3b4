"""Answers of engines become rows: rounds only where they are certain, sums by server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from components.bench.engines.acceptance import Acceptance
from components.bench.engines.connect import Answer, Connected, ServerPrompt
from components.bench.engines.rows import EngineRows, EngineSession, round_rows
from components.bench.engines.server import Turn, TurnResult
from components.bench.settings import EngineServer
from components.contract import UserError
from components.definitions import has_decoding, tokens_per_s


def connected(engine: Any) -> Connected:
    return Connected(EngineServer(base_url="http://127.0.0.1:8000/v1"), engine, "1", "m")


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
