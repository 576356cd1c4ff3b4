"""A server's answers: every prompt is answered, failed or skipped, none is answered twice, and no secret is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering_server import AnsweringServer, answering
from killed_step import context, files_of, run_killed
from serving_engine import free_port, served
from tiny_targets import make_tiny_target

import components.targets
from components.contract import Conversations, Prompts, Target, UserError
from components.data import collect_prompts, write_answers, write_answers_by_server
from components.data.formats.responses import open_answers
from components.engines.client import ids_of_answer, text_of
from components.targets import load_target
from components.targets.load import open_tokenizer

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 12,
    "max_prompt_tokens": 400,
    "concurrency": 4,
    "shard_size": 5,
    "retries": 3,
    "backoff_s": 0.001,
    "timeout_s": 300.0,
    "wait_s": 10.0,
}
EOS = 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    return load_target(model=str(make_tiny_target("qwen3", root / "model")), ctx=context(root / "artifact"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    found = tmp_path_factory.mktemp("prompts")
    return collect_prompts(num_train=9, num_validation=4, num_test=2, ctx=context(found / "p"))


def answer(prompt: Any) -> dict[str, Any]:
    """Deterministic tokens for a prompt of ids; every third answer ends by itself."""
    made = [(7 * len(prompt) + step) % 300 + 1 for step in range(6)]
    if len(prompt) % 3 == 0:
        return {"text": "", "finish_reason": "stop", "token_ids": [*made, EOS], "prompt_token_ids": list(prompt)}
    return {"text": "", "finish_reason": "length", "token_ids": [*made, *made], "prompt_token_ids": list(prompt)}


@pytest.fixture
def server() -> Iterator[AnsweringServer]:
    with answering(AnsweringServer(answer)) as serving:
        yield serving


def asked(server: AnsweringServer, target: Target, prompts: Prompts, out: Path, **more: Any) -> Conversations:
    settings = {**SETTINGS, "base_url": server.url, **more}
    return write_answers_by_server(target, prompts, **settings, ctx=context(out))


def test_the_servers_own_ids_are_the_answers(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path
) -> None:
    made = asked(server, target, prompts, tmp_path / "out", greedy_share=0.5)
    found = list(open_answers(made).conversations())
    assert made.info["num_asked"] == made.info["num_answered"] == len(found) == 13
    assert made.info["num_tokenised_again"] == made.info["num_failed"] == made.info["num_skipped"] == 0
    for row, ids, mask in found:
        assert ids[mask].tolist() == answer(ids[~mask].tolist())["token_ids"]
        assert (row.answered_by, row.ended) == ("server", int(ids[-1]) == EOS)
    assert {body["temperature"] for body in server.bodies} == {0.0, 0.8}
    whole = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # nothing of the server's own defaults
    assert all(whole.items() <= body.items() for body in server.bodies)
    assert made.info["num_sampled"] == sum(body["temperature"] > 0 for body in server.bodies) > 0
    assert all(row.temperature == 0.0 for row, _, _ in open_answers(made).conversations("validation"))
    assert len({body["seed"] for body in server.bodies}) == 13 and server.most_in_flight <= 4


MOODS = ["429 0", "429", "500", "503", "408", "cut off", "garbage", "nested", "says {}", 'says {"choices": []}']
MOODS += ['says {"choices": [{"text": 5, "finish_reason": "stop"}]}', 'says {"error": "overloaded"}', "says null"]
MOODS += ['says {"choices": [{"text": "", "finish_reason": "stop", "token_ids": [999999]}]}']
MOODS += ['says {"choices": [{"text": "", "finish_reason": "length", "token_ids": []}]}']
MOODS += ['says {"choices": [{"text": "", "finish_reason": "abort", "token_ids": [5]}]}']


def test_what_may_pass_is_tried_again(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path
) -> None:
    """Every prompt fails twice in ways of its own and is answered in the end, as if nothing had been."""
    calm = files_of(asked(server, target, prompts, tmp_path / "calm").path)
    server.attempts.clear()
    server.answered.clear()
    order: dict[Any, int] = {}
    server.mood = lambda prompt, attempt: (
        MOODS[(2 * order.setdefault(prompt, len(order)) + attempt) % len(MOODS)] if attempt < 3 else "well"
    )
    made = asked(server, target, prompts, tmp_path / "out")
    assert files_of(made.path) == calm
    assert set(server.attempts.values()) == {3} and set(server.answered.values()) == {1}


def test_a_hanging_server_is_not_waited_for(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path
) -> None:
    server.mood = lambda prompt, attempt: "hangs" if attempt == 1 and len(server.attempts) <= 2 else "well"
    made = asked(server, target, prompts, tmp_path / "out", timeout_s=15.0)
    assert made.info["num_answered"] == 13 and max(server.attempts.values()) == 2


def test_what_will_not_pass_is_set_aside_with_its_reason(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path
) -> None:
    refused: set[Any] = set()

    def mood(prompt: Any, attempt: int) -> str:
        if len(refused) < 2:
            refused.add(prompt)
        return "400" if prompt in refused else "well"

    server.mood = mood
    made = asked(server, target, prompts, tmp_path / "out", max_failed=0.2)
    info = made.info
    assert (info["num_asked"], info["num_answered"], info["num_failed"], info["num_skipped"]) == (13, 11, 2, 0)
    aside = [json.loads(line) for line in (made.path / "set_aside.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(aside) == 2 and all("status 400" in line["why"] for line in aside)
    assert all(server.attempts[prompt] == 1 for prompt in refused)


def test_too_many_failures_stop_the_step_and_keep_the_answers(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path
) -> None:
    failing = True
    server.mood = lambda prompt, attempt: "500" if failing and len(prompt) % 2 else "well"
    with pytest.raises(UserError, match=r"prompts failed .*status 500.* answers are kept"):
        asked(server, target, prompts, tmp_path / "out", retries=0)
    kept = {prompt for prompt, count in server.answered.items() if count}
    failing = False
    made = asked(server, target, prompts, tmp_path / "out", retries=0)
    assert made.info["num_answered"] == 13 and set(server.answered.values()) == {1} and kept


def test_a_server_that_goes_away_is_noticed(target: Target, prompts: Prompts, tmp_path: Path) -> None:
    with answering(AnsweringServer(answer)) as server:
        server.mood = lambda prompt, attempt: "500"
        with pytest.raises(UserError, match="8 prompts failed one after the other"):
            asked(server, target, prompts, tmp_path / "out", retries=0, concurrency=1)
        assert sum(server.attempts.values()) == 8
    with pytest.raises(UserError, match=r"no answer within .* start it first"):
        asked(server, target, prompts, tmp_path / "gone", wait_s=0.2)


def test_skipped_prompts_are_counted(server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path) -> None:
    lengths = sorted(len(body["prompt"]) for body in _bodies(server, target, prompts, tmp_path / "all"))
    made = asked(server, target, prompts, tmp_path / "some", max_prompt_tokens=lengths[6])
    assert made.info["num_skipped"] == sum(length > lengths[6] for length in lengths)
    assert made.info["num_answered"] + made.info["num_skipped"] == made.info["num_asked"] == 13


def _bodies(server: AnsweringServer, target: Target, prompts: Prompts, out: Path) -> list[dict[str, Any]]:
    asked(server, target, prompts, out)
    return list(server.bodies)


def test_a_text_server_is_given_text_and_its_text_becomes_tokens(
    target: Target, prompts: Prompts, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(target)
    told = "    return name 天空\n"
    with answering(AnsweringServer(lambda prompt: {"text": told, "finish_reason": "stop"}, engine="openai")) as server:
        made = asked(server, target, prompts, tmp_path / "out", max_new_tokens=64)
    assert made.info["num_tokenised_again"] == 13
    for _, ids, mask in open_answers(made).conversations():
        assert tokenizer.decode(ids[mask]) == told + "<|end|>"
    assert all(isinstance(body["prompt"], str) for body in server.bodies)
    assert all(body["top_p"] == 1.0 and "top_k" not in body for body in server.bodies)


def test_bytes_that_are_no_text_are_not_guessed_at(target: Target, prompts: Prompts, tmp_path: Path) -> None:
    broken = AnsweringServer(lambda prompt: {"text": "a\ufffd", "finish_reason": "stop"}, "openai")
    with answering(broken) as server, pytest.raises(UserError, match="no UTF-8"):
        asked(server, target, prompts, tmp_path / "out")


@pytest.mark.engines
def test_transformers_serve_says_what_the_target_says_here(tmp_path: Path) -> None:
    """A real engine with the built-in target: greedy answers are those of `data.write_answers`."""
    built_in = load_target(model="builtin", ctx=context(tmp_path / "target"))
    prompts = collect_prompts(num_train=5, num_validation=3, num_test=0, ctx=context(tmp_path / "p"))
    port = free_port()
    model = str(Path(components.targets.__file__).with_name("builtin"))
    command = [str(Path(sys.executable).with_name("transformers")), "serve", model]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    settings: dict[str, Any] = {"max_new_tokens": 16, "shard_size": 5, "max_prompt_tokens": 200}
    with served([*command, *options], tmp_path / "log", {"OMP_NUM_THREADS": "1"}):
        made = write_answers_by_server(
            built_in,
            prompts,
            base_url=f"http://127.0.0.1:{port}",
            model=model,
            wait_s=300.0,
            concurrency=2,
            greedy_share=1.0,
            **settings,
            ctx=context(tmp_path / "served"),
        )
    ours = write_answers(built_in, prompts, sampled_share=0.0, **settings, ctx=context(tmp_path / "ours"))
    assert made.info["server"].startswith("transformers") and made.info["num_answered"] == 8
    here = {row.row_id: ids.tolist() for row, ids, _ in open_answers(ours).conversations()}
    there = {row.row_id: ids.tolist() for row, ids, _ in open_answers(made).conversations()}
    same = sum(here[row_id] == ids for row_id, ids in there.items())
    assert set(here) == set(there) and same >= 7  # a tie of two tokens may be rounded either way


def test_the_key_is_sent_and_kept_nowhere(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_SERVER_KEY", "sk-secret-1")
    first = [True]

    def mood(prompt: Any, attempt: int) -> str:
        bad, first[0] = first[0], False
        return "400" if bad else "well"

    server.mood = mood
    made = asked(server, target, prompts, tmp_path / "out", api_key_variable="TEST_SERVER_KEY", max_failed=0.5)
    assert set(server.headers) == {"Bearer sk-secret-1"} and made.info["num_failed"] == 1
    files = [file for folder in (made.path, tmp_path / "out.scratch") for file in folder.iterdir()]
    assert not [file.name for file in files if b"sk-secret-1" in file.read_bytes()]
    monkeypatch.delenv("TEST_SERVER_KEY")
    with pytest.raises(UserError, match=r"base_url: .*TEST_SERVER_KEY is not set"):
        asked(server, target, prompts, tmp_path / "no", api_key_variable="TEST_SERVER_KEY")


@pytest.mark.parametrize("after", [2, 7, 12])
def test_killed_at_any_moment_no_prompt_is_answered_twice(
    server: AnsweringServer, target: Target, prompts: Prompts, tmp_path: Path, after: int
) -> None:
    calm = files_of(asked(server, target, prompts, tmp_path / "calm").path)
    server.answered.clear()
    out = tmp_path / "out"
    settings = {**SETTINGS, "base_url": server.url}
    assert run_killed(lambda ctx: write_answers_by_server(target, prompts, **settings, ctx=ctx), out, after)
    journal = tmp_path / "out.scratch" / "answered.jsonl"
    kept = len(journal.read_bytes().splitlines()) - 1
    assert after <= kept <= after + 4
    with journal.open("ab") as torn:
        torn.write(b'{"id": "0123", "ids": [1, 2')  # what a kill in the middle of a line leaves
    server.settle()
    before = server.answered.copy()
    made = asked(server, target, prompts, out)
    assert files_of(made.path) == calm
    again = server.answered - before
    assert sum(again.values()) == 13 - kept


def test_text_and_tokens_there_and_back(target: Target) -> None:
    tokenizer = open_tokenizer(target)
    prompt = tokenizer("def read(path):")["input_ids"]
    shown = text_of(tokenizer, prompt)
    assert shown == "def read(path):"
    found = ids_of_answer(tokenizer, shown, prompt, " return open(path)")
    assert found is not None and tokenizer.decode([*prompt, *found]) == "def read(path): return open(path)"
