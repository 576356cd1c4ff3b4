"""Recorded features are the states of a plain pass, whichever process records them and whatever kills it."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import shutil
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_targets import Family, make_tiny_target
from transformers import AutoModelForCausalLM

from components.contract import Context, Conversations, Prompts, Target, UserError
from components.data import collect_prompts, features_on_the_fly, record_features, write_answers
from components.data.features.format import States, forward_passes, open_features
from components.data.formats.responses import open_answers
from components.targets import load_target
from components.targets.load import open_target
from components.targets.source import open_record

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 12,
    "batch_size": 3,
    "shard_size": 5,
    "sampled_share": 0.5,
    "max_prompt_tokens": 400,
}


def context(folder: Path, events: list[Any] | None = None) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1, send=None if events is None else events.append)


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    family: Family = request.param
    return load_target(model=str(make_tiny_target(family, root / "model")), ctx=context(root / "artifact"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return collect_prompts(num_train=9, num_validation=4, num_test=2, ctx=context(tmp_path_factory.mktemp("prompts")))


@pytest.fixture(scope="module")
def answers(target: Target, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    return write_answers(target, prompts, **SETTINGS, ctx=context(tmp_path_factory.mktemp("answers")))


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("shard-*"))}


def test_features_are_the_states_of_a_plain_pass(target: Target, answers: Conversations, tmp_path: Path) -> None:
    features = record_features(target, answers, tokens_per_pass=256, ctx=context(tmp_path))
    opened = open_features(features)
    model = open_target(target, kernel="transformers")
    conversations = {row.row_id: (row, ids, mask) for row, ids, mask in open_answers(answers).conversations()}
    seen = set()
    for split in ("train", "validation"):
        for example in opened.examples(split):
            row, ids, mask = conversations[example.row_id]
            seen.add(example.row_id)
            assert (row.split, row.workload) == (split, example.workload)
            assert torch.equal(example.ids, ids) and torch.equal(example.mask, mask)
            passed = model.forward(ids[None], model.new_cache(1, len(ids)), logits="none", features=True)
            assert passed.taps is not None and passed.last is not None
            for stored, states in ((example.taps, passed.taps[0]), (example.last, passed.last[0])):
                assert stored.dtype == torch.bfloat16
                torch.testing.assert_close(stored.float(), states, rtol=1e-2, atol=1e-3)
    assert seen == set(conversations)
    counts = opened.token_counts("train")
    assert int(counts.sum()) == opened.manifest["splits"]["train"]["answer_tokens"]
    assert opened.manifest["tap_layers"] == [2, 4, 5]
    assert sum(file.stat().st_size for file in tmp_path.glob("shard-*")) == features.info["bytes"]


@pytest.mark.parametrize("step", [record_features, features_on_the_fly])
@pytest.mark.parametrize("taps", [[1], [1, 3, 5], [1, 2, 4, 6, 7]], ids=len)
def test_any_layers_are_recorded_as_transformers_names_them(
    taps: list[int], step: Any, target: Target, answers: Conversations, tmp_path: Path
) -> None:
    features = step(target, answers, tap_layers=taps, ctx=context(tmp_path))
    opened = open_features(features).computed_by(open_target(target, kernel="plain"))
    model: Any = AutoModelForCausalLM.from_pretrained(open_record(target.path)[0], dtype=torch.float32).eval()
    assert opened.manifest["tap_layers"] == taps == features.info["tap_layers"]
    for example in opened.examples("validation"):
        with torch.no_grad():
            states = model(input_ids=example.ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[tap][0] for tap in taps], -1)
        torch.testing.assert_close(example.taps.float(), expected, rtol=1e-2, atol=1e-3)


def test_features_repeat_bit_for_bit_after_a_kill(target: Target, answers: Conversations, tmp_path: Path) -> None:
    whole = record_features(target, answers, ctx=context(tmp_path / "whole"))
    part = tmp_path / "part"
    shutil.copytree(whole.path, part)
    (part / "shard-00001.safetensors").unlink()
    (part / "manifest.json").unlink()
    again = record_features(target, answers, ctx=context(part))
    assert shards(part) == shards(whole.path)
    assert again.info == whole.info


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_a_shard_is_written_while_it_is_computed_and_states_of_earlier_passes_are_gone(
    storage: Literal["bf16", "fp8"],
    target: Target,
    answers: Conversations,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a width of 4,096 the states of a shard of 256 long answers are gigabytes."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def passes(*arguments: Any) -> Iterator[dict[int, States]]:
        for number, states_by_row in enumerate(forward_passes(*arguments)):
            assert number < 2 or seen[number - 2]() is None
            seen.append(weakref.ref(next(iter(states_by_row.values())).taps))
            yield states_by_row

    monkeypatch.setattr("components.data.features.record.forward_passes", passes)
    record_features(target, answers, storage=storage, tokens_per_pass=8, ctx=context(tmp_path))
    assert len(seen) == len(list(open_answers(answers).conversations())) >= 9


def test_another_process_in_another_order_writes_the_same_bytes(
    target: Target, prompts: Prompts, answers: Conversations, tmp_path: Path
) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def elsewhere(function: Callable[..., Any], shards: Sequence[Any]) -> Iterator[Any]:
            last_first = [pool.submit(function, shard, float) for shard in reversed(shards)]  # float: tells nobody
            return iter([future.result() for future in reversed(last_first)])

        events: list[dict[str, Any]] = []
        ctx = context(tmp_path / "answers", events)
        ctx.mapper = elsewhere
        again = write_answers(target, prompts, **SETTINGS, ctx=ctx)
        assert {file.name: file.read_bytes() for file in again.path.iterdir()} == {
            file.name: file.read_bytes() for file in answers.path.iterdir()
        }
        assert again.info == answers.info
        assert [event["done"] for event in events if event["event"] == "progress"] == [1, 1, 2, 2, 3, 3]
        here = record_features(target, answers, ctx=context(tmp_path / "here"))
        ctx = context(tmp_path / "there")
        ctx.mapper = elsewhere
        there = record_features(target, answers, ctx=ctx)
        assert shards(there.path) == shards(here.path) and len(shards(there.path)) == 3
        assert there.info == here.info


def test_features_say_their_size_first_and_refuse_a_full_disk(
    target: Target, answers: Conversations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    events: list[dict[str, Any]] = []
    with pytest.raises(UserError, match="MiB free"):
        record_features(target, answers, ctx=context(tmp_path, events))
    assert "on disk" in events[0]["message"]
    assert not list(tmp_path.glob("shard-*"))
