"""What a server hands out becomes the features that are recorded here, each conversation asked for once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answering_server import answering
from killed_step import context, files_of, run_killed
from states_server import StatesServer
from tiny_targets import VOCAB_SIZE, make_tiny_target

from components.contract import Conversations, Features, Target, UserError
from components.data import features_from_server, record_features
from components.data.features.format import open_features
from components.data.formats.responses import AnswerRow, Conversation, shard_name, write_shard
from components.engines import hidden_states
from components.engines.hidden_states import (
    CPU_CONNECTOR,
    CPU_MODULE,
    FP8_CONNECTOR,
    FP8_MODULE,
    server_command,
    server_options,
)
from components.targets import load_target

HIDDEN = 64
FLIGHT = 3
SETTINGS: dict[str, Any] = {
    "concurrency": FLIGHT,
    "retries": 2,
    "backoff_s": 0.001,
    "timeout_s": 300.0,
    "wait_s": 10.0,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    return load_target(model=str(make_tiny_target("llama", root / "model")), ctx=context(root / "artifact"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    """Thirteen random conversations in three shards."""
    folder = tmp_path_factory.mktemp("answers")
    generator = torch.Generator().manual_seed(0)
    num_tokens = 0
    for number, count in enumerate((5, 5, 3)):
        conversations = []
        for place in range(count):
            length = 9 + 7 * place + number
            num_tokens += length
            ids = torch.randint(1, VOCAB_SIZE, (length,), generator=generator)
            split = "train" if place else "validation"
            row = AnswerRow(f"{number}-{place}", split, "w", 0.0, 2, length - 2, True, 1.0)
            conversations.append(Conversation(row, ids, torch.arange(length) >= 2))
        write_shard(folder / shard_name(number), conversations)
    names = [shard_name(number) for number in range(3)]
    (folder / "manifest.json").write_text(f'{{"shards": {names}}}'.replace("'", '"'))
    return Conversations(key="a", path=folder, info={"num_tokens": num_tokens})


@pytest.fixture(scope="module")
def recorded(target: Target, answers: Conversations, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return record_features(target, answers, ctx=context(tmp_path_factory.mktemp("recorded") / "out"))


@pytest.fixture
def server(target: Target, recorded: Features, tmp_path: Path) -> Iterator[StatesServer]:
    (tmp_path / "shared").mkdir()
    with answering(StatesServer(target, recorded, tmp_path / "shared")) as serving:
        assert isinstance(serving, StatesServer)
        yield serving


def served(server: StatesServer, target: Target, answers: Conversations, out: Path, **more: Any) -> Features:
    settings = {**SETTINGS, "base_url": server.url, "folder": str(server.folder), **more}
    return features_from_server(target, answers, **settings, ctx=context(out))


def test_served_states_are_the_recorded_features_and_no_file_of_the_server_is_left(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    made = served(server, target, answers, tmp_path / "out")
    assert files_of(made.path) == files_of(recorded.path)
    assert made.info == recorded.info
    assert sorted(server.answered.values()) == [1] * 13 and server.most_in_flight <= FLIGHT
    assert list(server.folder.iterdir()) == []
    assert server.bodies[0]["kv_transfer_params"] == {"expected": [4, HIDDEN]}
    halved = served(server, target, answers, tmp_path / "fp8", storage="fp8")
    ours = record_features(target, answers, storage="fp8", ctx=context(tmp_path / "ours"))
    for row in open_features(ours).rows("train"):
        one, other = open_features(halved).load(row), open_features(ours).load(row)
        torch.testing.assert_close(one.taps.float(), other.taps.float(), rtol=2**-3, atol=1e-2)


def test_fp8_files_are_scaled_back(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    def scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        states = tensors["hidden_states"].float()
        scales = states.abs().amax((1, 2), keepdim=True) / 448
        return {**tensors, "hidden_states": (states / scales).to(torch.float8_e4m3fn), "hidden_states_scales": scales}

    server.change = scaled
    made = open_features(served(server, target, answers, tmp_path / "out"))
    for row in made.rows("train"):
        before, after = open_features(recorded).load(row), made.load(row)
        largest = float(before.taps.float().abs().max())
        torch.testing.assert_close(after.taps.float(), before.taps.float(), rtol=2**-4, atol=largest / 2**9)


@pytest.mark.parametrize("after", [1, 6, 12])
def test_killed_at_any_moment_no_conversation_that_came_is_asked_for_again(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path, after: int
) -> None:
    out = tmp_path / "out"
    settings = {**SETTINGS, "base_url": server.url, "folder": str(server.folder)}
    assert run_killed(lambda ctx: features_from_server(target, answers, **settings, ctx=ctx), out, after)
    server.settle()
    assert after <= sum(server.answered.values()) <= after + 2 * FLIGHT
    made = served(server, target, answers, out)
    twice = sum(server.answered.values()) - 13
    assert twice <= FLIGHT, "only what was in flight is asked for twice"
    assert files_of(made.path) == files_of(recorded.path)
    left = {file.name.removesuffix(".lock") for file in server.folder.iterdir()}
    assert len(left) <= twice and not any(name.startswith("kept") for name in left)


def test_a_file_that_is_gone_or_torn_is_asked_for_again(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    settings = {**SETTINGS, "base_url": server.url, "folder": str(server.folder)}
    assert run_killed(lambda ctx: features_from_server(target, answers, **settings, ctx=ctx), out, 4)
    server.settle()
    gone, torn = sorted(server.folder.glob("kept-*.safetensors"))[:2]
    gone.unlink()
    torn.write_bytes(torn.read_bytes()[:99])
    assert files_of(served(server, target, answers, out).path) == files_of(recorded.path)


def test_what_may_pass_is_tried_again(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    server.mood = lambda prompt, attempt: {1: "503", 2: "garbage"}.get(attempt, "well")
    assert files_of(served(server, target, answers, tmp_path / "out").path) == files_of(recorded.path)


def test_a_server_that_never_writes_stops_the_step_which_goes_on_where_it_was(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    server.change = lambda tensors: tensors if len(tensors["token_ids"]) < 30 else {}
    with pytest.raises(UserError, match=r"wrote no cmpl-.*is its folder full\?\); \d+ conversations are kept") as error:
        served(server, target, answers, tmp_path / "out")
    assert "\n" not in str(error.value)
    server.change = lambda tensors: tensors
    assert files_of(served(server, target, answers, tmp_path / "out").path) == files_of(recorded.path)
    assert max(server.answered.values()) <= 1 + SETTINGS["retries"] + 1


def _said(server: StatesServer, **changed: Any) -> None:
    usual = server.said
    server.answer = lambda prompt: {**usual(prompt), **changed}


FAULTS: dict[str, tuple[Callable[[StatesServer], Any], str]] = {
    "other tokens echoed": (lambda server: _said(server, prompt_token_ids=[1, 2]), "has seen other tokens"),
    "other tokens in the file": (
        lambda server: setattr(server, "change", lambda t: {**t, "token_ids": t["token_ids"] + 1}),
        "holds states of other tokens",
    ),
    "a layer too few": (
        lambda server: setattr(server, "change", lambda t: {**t, "hidden_states": t["hidden_states"][:, 1:].clone()}),
        r"holds states \[\d+, 3, 64\], not \[\d+, 4, 64\]",
    ),
    "another width": (
        lambda server: setattr(server, "change", lambda t: {**t, "hidden_states": t["hidden_states"].repeat(1, 1, 2)}),
        r"holds states \[\d+, 4, 128\]",
    ),
    "another last layer": (
        lambda server: setattr(server, "change", lambda t: {**t, "hidden_states": t["hidden_states"].flip(1)}),
        r"says token \d+ after \d-\d, which the target's norm and head do not make",
    ),
    "not a number": (
        lambda server: setattr(server, "change", lambda t: {**t, "hidden_states": t["hidden_states"] * torch.nan}),
        "not all finite",
    ),
    "no connector": (lambda server: setattr(server, "beside", lambda prompt: {}), "names no file of hidden states"),
    "a path that is no file of states": (
        lambda server: setattr(server, "beside", lambda p: {"kv_transfer_params": {"hidden_states_path": "/etc/x"}}),
        "names '/etc/x', which is no file of hidden states",
    ),
    "another vocabulary": (
        lambda server: setattr(server, "mood", lambda prompt, attempt: "400"),
        "refuses a conversation of .* serve the target that answered",
    ),
    "a limit below the longest": (
        lambda server: setattr(server, "limit", 37),
        "takes conversations of 36 tokens, and the longest has 38; start it with --max-model-len 39",
    ),
    "another engine": (lambda server: setattr(server, "engine", "openai"), "is openai, which hands out no states"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_is_not_set_up_for_it_is_refused_in_one_line(
    fault: str, server: StatesServer, target: Target, answers: Conversations, tmp_path: Path
) -> None:
    plant, says = FAULTS[fault]
    plant(server)
    with pytest.raises(UserError, match=says) as error:
        served(server, target, answers, tmp_path / "out")
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_the_servers_is_refused_in_one_line(
    server: StatesServer, target: Target, answers: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "APPEARS_WITHIN_S", 0.05)
    with pytest.raises(UserError, match=r"folder: .*missing is no folder here"):
        served(server, target, answers, tmp_path / "out", folder=str(tmp_path / "missing"))
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match=r"folder: .*other has no cmpl-.*, which http.* says it wrote; name"):
        served(server, target, answers, tmp_path / "out", folder=str(tmp_path / "other"))


def test_the_docs_say_the_command_that_the_code_makes() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs" / "my-data.md").read_text(encoding="utf-8")
    command = server_command(
        "meta-llama/Llama-3.3-70B-Instruct", [2, 40, 77, 80], "/dev/shm/draftsmith", max_tokens=4096, gpus=4
    )
    assert f"\n{command}\n" in page
    for connector, module in ((FP8_CONNECTOR, FP8_MODULE), (CPU_CONNECTOR, CPU_MODULE)):
        assert connector in page and module in page
        options = server_options([2], "/f", connector=connector, module=module)
        assert json.loads(options[3])["kv_connector_module_path"] == module
