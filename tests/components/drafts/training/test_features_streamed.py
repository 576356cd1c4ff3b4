"""A drafter trained on what a server hands out as training goes is the one trained on the stored features."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.contract import Context, Conversations, Draft, Features, Target, UserError
from components.data import collect_prompts, features_from_server, record_features, write_answers
from components.data.features.format import open_features
from components.drafts import train_draft
from components.targets import load_target
from tests.components.data.answering_server import answering
from tests.components.data.killed_step import context, run_killed
from tests.components.data.states_server import StatesServer

FLIGHT = 3
SETTINGS: dict[str, Any] = {
    "method": "eagle3",
    "num_steps": 8,
    "batch_tokens": 512,
    "draft_vocab_size": 128,
    "settings": {"eagle3": {"ttt_steps": 2}},
    "eval_every": 4,
    "checkpoint_minutes": 1e-9,  # after every step
    "precision": "float32",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]) -> Target:
    return load_target(model=str(tiny_folder("llama")), ctx=context(tmp_path_factory.mktemp("target") / "a"))


@pytest.fixture(scope="module")
def answers(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    root = tmp_path_factory.mktemp("answers")
    prompts = collect_prompts(num_train=12, num_validation=4, num_test=2, ctx=context(root / "prompts"))
    return write_answers(target, prompts, max_new_tokens=24, batch_size=8, ctx=context(root / "answers"))


@pytest.fixture(scope="module")
def recorded(target: Target, answers: Conversations, tmp_path_factory: pytest.TempPathFactory) -> Features:
    return record_features(target, answers, ctx=context(tmp_path_factory.mktemp("recorded") / "out"))


@pytest.fixture
def server(target: Target, recorded: Features, tmp_path: Path) -> Iterator[StatesServer]:
    (tmp_path / "shared").mkdir()
    with answering(StatesServer(target, recorded, tmp_path / "shared")) as serving:
        assert isinstance(serving, StatesServer)
        yield serving


def streamed(server: StatesServer, target: Target, answers: Conversations, out: Path, **more: Any) -> Features:
    settings: dict[str, Any] = {"base_url": server.url, "folder": str(server.folder), "storage": "none"}
    settings |= {"concurrency": FLIGHT, "retries": 1, "backoff_s": 0.001, "timeout_s": 20.0, **more}
    return features_from_server(target, answers, **settings, ctx=context(out))


def test_three_kills_change_no_bit_and_ask_for_nothing_twice_that_had_come(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    features = streamed(server, target, answers, tmp_path / "features")
    assert server.answered.total() == 0 and features.info["bytes"] < recorded.info["bytes"] / 20
    out = tmp_path / "out"

    def train(ctx: Context) -> Draft:
        return train_draft(target, features, **SETTINGS, ctx=ctx)

    for after in (1, 3, 2):  # steps of each attempt; checkpoints are two apart
        assert run_killed(train, out, after)
        server.settle()
    train(context(out))
    train_draft(target, recorded, **SETTINGS, ctx=context(tmp_path / "stored"))
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "stored"))
    assert one == other
    twice = sum(count - 1 for count in server.answered.values())
    assert twice <= 3 * FLIGHT and max(server.answered.values()) <= 4, "only what was in flight at a kill"


def losses_of(out: Path) -> list[float]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_two_processes_ask_for_their_shares_and_for_what_both_read_once_also_when_one_is_killed(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    """All fits into the folder, so nothing that came is asked for again: not by the other process, nor after a kill."""
    features, ctx = streamed(server, target, answers, tmp_path / "features"), context(tmp_path / "out")
    killed: list[int] = []

    def listen(event: Mapping[str, Any]) -> None:
        if event["event"] == "progress" and event["done"] == 3 and not killed:
            workers = psutil.Process().children(recursive=True)
            killed.append(next(worker.pid for worker in workers if worker.environ().get("RANK") == "1"))
            os.kill(killed[0], signal.SIGKILL)

    ctx.send, slow = listen, {**SETTINGS, "peak_lr": 1e-5}  # rounding of other sums is not magnified
    train_draft(target, features, **slow, processes=2, ctx=ctx)
    train_draft(target, recorded, **slow, ctx=context(tmp_path / "stored"))
    of_streamed, of_stored = (losses_of(tmp_path / name) for name in ("out", "stored"))
    assert killed and of_streamed == pytest.approx(of_stored, rel=1e-5)
    read = open_features(recorded)
    assert len(server.answered) == len(read.rows("train")) + len(read.rows("validation"))
    assert sum(count - 1 for count in server.answered.values()) <= 2 * FLIGHT, "only what was in flight at the kill"
    assert not list(server.folder.glob("*.asked"))


def test_a_small_buffer_holds_the_server_back_and_changes_no_bit(
    server: StatesServer, target: Target, answers: Conversations, recorded: Features, tmp_path: Path
) -> None:
    opened = open_features(recorded)
    largest = max(row.num_tokens for row in opened.rows("train")) * 4 * 2 * int(opened.manifest["hidden_size"])
    room = 4 * largest
    features = streamed(server, target, answers, tmp_path / "features", buffer_gb=room / 1e9)
    held: list[int] = []
    usual = server.named

    def watched(prompt: tuple[int, ...]) -> dict[str, Any]:
        held.append(sum(file.stat().st_size for file in server.folder.glob("kept-*.safetensors")))
        return usual(prompt)

    server.beside = watched
    train_draft(target, features, **SETTINGS, ctx=context(tmp_path / "out"))
    train_draft(target, recorded, **SETTINGS, ctx=context(tmp_path / "stored"))
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "stored"))
    assert one == other
    num_rows = len(opened.rows("train")) + len(opened.rows("validation"))
    assert server.answered.total() > num_rows, "what had to make room is asked for again"
    behind = held[num_rows:]  # the scale of a new drafter and its evaluation read all rows at once
    assert behind and max(behind) <= room + 512 * 4 * 2 * 64, "the buffer, and the batch in training"


def test_a_server_that_goes_away_stops_training_in_one_line(
    server: StatesServer, target: Target, answers: Conversations, tmp_path: Path
) -> None:
    features = streamed(server, target, answers, tmp_path / "features", buffer_gb=1e-9)
    training = len(json.loads((features.path / "manifest.json").read_text())["rows"])
    server.mood = lambda prompt, attempt: "well" if server.answered.total() < training + 2 else "503"
    with pytest.raises(UserError, match="training goes on from its checkpoint") as error:
        train_draft(target, features, **SETTINGS, ctx=context(tmp_path / "out"))
    assert "\n" not in str(error.value)
