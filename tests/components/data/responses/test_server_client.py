"""Requests are in the format of their engine, and the journal goes on after its last whole line."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.contract import UserError
from components.data.responses.generate import Job
from components.data.responses.server_client import (
    CompletionClient,
    Journal,
    RequestOptions,
    ServerAnswer,
    _Reply,
)
from components.engines.client import ServerInfo
from components.engines.requests import Patience, RefusedPrompt
from components.engines.server_address import ServerAddress


@pytest.mark.parametrize(("engine", "off", "penalty"), [("sglang", -1, "repetition_"), ("llama.cpp", 0, "repeat_")])
def test_no_engine_samples_by_defaults_of_its_own(engine: str, off: int, penalty: str) -> None:
    asking = CompletionClient(
        ServerAddress(base_url="http://127.0.0.1:9"),
        ServerInfo(engine, "1", "m"),
        RequestOptions(None, 9, (), 4, 0.8, 0, Patience(0, 0.1, 1.0)),
    )
    _, body = asking._request(Job("p", "train", "w", (1, 2), True), "")
    sampling = body.get("sampling_params", body)
    wanted = {"temperature": 0.8, "top_p": 1.0, "top_k": off, "min_p": 0.0, f"{penalty}penalty": 1.0}
    assert wanted.items() <= sampling.items()


@pytest.mark.parametrize(
    ("engine", "bias"),
    [("vllm", {"3": -100, "7": -100}), ("sglang", {"3": -100, "7": -100}), ("llama.cpp", [[3, False], [7, False]])],
)
def test_requests_bias_against_what_the_target_suppresses(engine: str, bias: object) -> None:
    options = RequestOptions(None, 9, (), 4, 0.8, 0, Patience(0, 0.1, 1.0), suppressed=frozenset({7, 3}))
    asking = CompletionClient(ServerAddress(base_url="http://127.0.0.1:9"), ServerInfo(engine, "1", "m"), options)
    job = Job("p", "train", "w", (1, 2), True)
    _, body = asking._request(job, "")
    assert body.get("sampling_params", body)["logit_bias"] == bias
    with pytest.raises(RefusedPrompt, match=r"says token 7, which the target's generation_config.json suppresses"):
        asking._validate(job, "", _Reply("", [1, 7], False, None))


def test_a_journal_goes_on_after_its_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "answered.jsonl"
    with Journal(file, {"model": "a"}) as journal:
        journal.add("1", ServerAnswer((1, 2), True, True))
    whole = file.read_bytes()
    for torn in (b"", b'{"id": "2"', b"\x00\x00\x00\n\x00", b'{"id"\n', b"null\n"):
        file.write_bytes(whole + torn)
        with Journal(file, {"model": "a"}) as journal:
            assert journal.answers == {"1": ServerAnswer((1, 2), True, True)}
            assert file.read_bytes() == whole
    with (
        pytest.raises(UserError, match="model: an earlier attempt was answered with 'a'"),
        Journal(file, {"model": "b"}),
    ):
        raise AssertionError("unreachable")
