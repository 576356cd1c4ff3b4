"""What features will cost is said first: the probe's time holds for the whole, and a disk too small is refused."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import shutil
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_targets import VOCAB_SIZE, make_tiny_target

from components.contract import Context, Conversations, Target, UserError
from components.data import features_on_the_fly, record_features
from components.data.features import record
from components.data.features.format import bytes_per_token, open_features
from components.data.features.record import SPARE_BYTES, FeatureShard, estimated_seconds, format_duration, lengths_of
from components.data.formats.responses import AnswerRow, Conversation, shard_name, write_shard
from components.targets import load_target


def context(folder: Path, events: list[Any] | None = None) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1, send=None if events is None else events.append)


def write_answers_of(folder: Path, lengths: list[list[int]]) -> Conversations:
    """Random conversations of these lengths, shard by shard."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for number, of_shard in enumerate(lengths):
        conversations = []
        for place, length in enumerate(of_shard):
            ids = torch.randint(1, VOCAB_SIZE, (length,), generator=generator)
            row = AnswerRow(f"{number}-{place}", "train" if place else "validation", "w", 0.0, 2, length - 2, True, 1.0)
            conversations.append(Conversation(row, ids, torch.arange(length) >= 2))
        write_shard(folder / shard_name(number), conversations)
    names = [shard_name(number) for number in range(len(lengths))]
    (folder / "manifest.json").write_text(f'{{"shards": {names}}}'.replace("'", '"'))
    return Conversations(key="a", path=folder, info={"num_tokens": sum(map(sum, lengths))})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    return load_target(model=str(make_tiny_target("llama", root / "model")), ctx=context(root / "artifact"))


def free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 50, 0, free))


USUAL = [2, 4, 5]


@pytest.mark.parametrize("taps", [None, [6], [1, 2, 3, 5, 7]])
@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_the_disk_must_hold_what_is_left_to_the_byte(
    storage: Any, taps: list[int] | None, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = write_answers_of(tmp_path / "answers", [[30, 40], [50, 20]])
    size = 140 * bytes_per_token(64, storage, len(taps or USUAL))
    needed = size + SPARE_BYTES
    free_bytes(monkeypatch, needed - 1)
    with pytest.raises(UserError, match=r"or take data\.features_on_the_fly"):
        record_features(target, answers, tap_layers=taps, storage=storage, ctx=context(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("shard-*"))
    free_bytes(monkeypatch, needed)
    made = record_features(target, answers, tap_layers=taps, storage=storage, ctx=context(tmp_path / "out"))
    assert size <= made.info["bytes"] < size + 4096
    assert open_features(made).manifest["storage"] == storage


def test_features_on_the_fly_need_no_room_for_states(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = write_answers_of(tmp_path / "answers", [[30, 40], [50, 20]])
    free_bytes(monkeypatch, 140 * 5 + SPARE_BYTES)
    events: list[Any] = []
    made = features_on_the_fly(target, answers, ctx=context(tmp_path / "out", events))
    assert "ids and masks only" in events[0]["message"]
    assert made.info["bytes"] < 4096 and made.info["storage"] == "none"


def test_a_probe_of_a_few_passes_tells_the_time_of_all(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a factor of four of this thread's own time: it works alone here, whatever else the machine does."""
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=time.thread_time))
    lengths = [[20 + (7 * place) % 90 for place in range(40)] for _ in range(5)]
    answers = write_answers_of(tmp_path / "answers", lengths)
    shards = [answers.path / shard_name(number) for number in range(5)]
    assert [lengths_of(shard) for shard in shards] == lengths
    events: list[Any] = []
    ctx = context(tmp_path / "out", events)
    estimate = estimated_seconds(
        ctx, FeatureShard(tmp_path, shards[0], target.path, (2, 4, 5), 256, "bf16", "cpu", 1), shards
    )
    assert estimate is not None
    start = time.thread_time()
    record_features(target, answers, tokens_per_pass=256, ctx=ctx)
    assert estimate / 4 < time.thread_time() - start < estimate * 4
    assert any("by a probe" in event.get("message", "") for event in events)


def test_a_job_as_short_as_its_probe_is_not_probed(target: Target, tmp_path: Path) -> None:
    answers = write_answers_of(tmp_path / "answers", [[30, 40], [50, 20]])
    events: list[Any] = []
    record_features(target, answers, ctx=context(tmp_path / "out", events))
    assert not any("probe" in str(event) for event in events)


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_two_workers_write_the_bytes_of_one(storage: Any, target: Target, tmp_path: Path) -> None:
    """Two processes at once, the shards given to them last to first, as a cluster may."""
    answers = write_answers_of(tmp_path / "answers", [[30, 40, 9], [50, 20], [7, 66], [12, 31, 31]])
    alone = record_features(target, answers, storage=storage, tokens_per_pass=64, ctx=context(tmp_path / "alone"))
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:

        def elsewhere(function: Callable[..., Any], shards: Sequence[Any]) -> Iterator[Any]:
            last_first = [pool.submit(function, shard, float) for shard in reversed(shards)]  # float: tells nobody
            return iter([future.result() for future in reversed(last_first)])

        ctx = context(tmp_path / "together")
        ctx.mapper = elsewhere
        together = record_features(target, answers, storage=storage, tokens_per_pass=64, ctx=ctx)
    found, wanted = ({f.name: f.read_bytes() for f in made.path.iterdir()} for made in (together, alone))
    assert found == wanted and len(wanted) == 5
    assert together.info == alone.info


@pytest.mark.parametrize("step", [record_features, features_on_the_fly])
def test_layers_that_the_target_lacks_are_refused_before_anything_runs(
    step: Any, target: Target, tmp_path: Path
) -> None:
    answers = write_answers_of(tmp_path / "answers", [[30]])
    lacked = r"tap_layers \[3, 8\]: the target has 8 layers, of which 1 to 7 can be tapped"
    for layers, fault in (([3, 8], lacked), ([0, 2], "from 1 on"), ([5, 3], "ascending"), ([3, 3], "different")):
        with pytest.raises(UserError, match=fault):
            step(target, answers, tap_layers=layers, ctx=context(tmp_path / "out"))
    assert not list((tmp_path / "out").iterdir())


def test_times_are_said_in_words() -> None:
    assert [format_duration(s) for s in (0.2, 89.0, 600.0, 9000.0)] == ["1 s", "89 s", "10 min", "2.5 h"]
