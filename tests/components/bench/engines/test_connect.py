"""Requests are what each engine takes, and chunks of its stream become one answer."""

from __future__ import annotations

from typing import Any

import pytest

from components.bench.engines.acceptance import Acceptance
from components.bench.engines.connect import Answer, Connected, ServerPrompt, _add_chunk, request_body
from components.bench.settings import EngineServer


def connected(engine: Any) -> Connected:
    return Connected(EngineServer(base_url="http://127.0.0.1:8000/v1"), engine, "1", "m")


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


ASKED = ServerPrompt("p", "code", [1, 2, 3], None)


def test_no_request_finds_another_ones_prompt_in_vllms_cache() -> None:
    salts = {request_body(connected("vllm"), ASKED, 16, 0.0)[1]["cache_salt"] for _ in range(3)}
    assert len(salts) == 3 and all(salts)
