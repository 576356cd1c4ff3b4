"""A real vLLM hands out hidden states: those that we record ourselves but for rounding, each conversation once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving_engine import requests_ended

from benchmarks.engine_cases import EngineCases
from benchmarks.engine_vllm import vllm_process
from components.contract import Context, Conversations, Draft, Features
from components.data import collect_prompts, features_from_server, record_features, write_answers
from components.data.features.format import open_features
from components.drafts import train_draft
from components.engines.hidden_states import CPU_CONNECTOR, CPU_MODULE, server_options
from components.targets.load import target_facts
from components.targets.shape import taps_of
from tests.components.data.killed_step import context, run_killed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200), pytest.mark.usefixtures("vllm_ready")]

ROOT = Path(__file__).resolve().parents[2]
FLIGHT = 4
TRAINING: dict[str, Any] = {
    "method": "eagle3",
    "num_steps": 8,
    "batch_tokens": 1024,
    "draft_vocab_size": 128,
    "settings": {"eagle3": {"ttt_steps": 2}},
    "eval_every": 4,
    "precision": "float32",
}
ROUNDING = 2.0**-7
"""A bfloat16 has 8 bits: states that differ by float32 rounding alone may round to neighbours."""


@pytest.fixture(scope="module")
def answers(cases: EngineCases, tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    root = tmp_path_factory.mktemp("answers")
    prompts = collect_prompts(num_train=14, num_validation=4, num_test=0, ctx=context(root / "prompts"))
    return write_answers(cases.target, prompts, max_new_tokens=40, shard_size=7, ctx=context(root / "answers"))


@pytest.fixture
def server(cases: EngineCases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The settings that lead to a vLLM with our connector for CPUs."""
    num_layers = int(target_facts(cases.target)["shape"]["num_layers"])
    folder = tmp_path / "shared"
    folder.mkdir()
    layers = [*taps_of(num_layers), num_layers]
    more = server_options(layers, str(folder), connector=CPU_CONNECTOR, module=CPU_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with vllm_process(cases.target_folder, tmp_path / "vllm.log", more) as (address, _):
        yield {"base_url": address, "folder": str(folder), "concurrency": FLIGHT, "wait_s": 300.0}


def test_vllm_hands_out_the_states_that_we_record_and_a_kill_asks_for_none_twice(
    cases: EngineCases, answers: Conversations, server: dict[str, Any], tmp_path: Path
) -> None:
    ours = open_features(record_features(cases.target, answers, ctx=context(tmp_path / "ours")))

    def asked(ctx: Context) -> Features:
        return features_from_server(cases.target, answers, **server, ctx=ctx)

    assert run_killed(asked, tmp_path / "out", after=9)
    theirs = open_features(asked(context(tmp_path / "out")))
    assert 18 <= requests_ended(server["base_url"]) <= 18 + FLIGHT
    assert not list(Path(server["folder"]).glob("kept-*"))
    worst = 0.0
    for split in ("train", "validation"):
        for row in ours.rows(split):
            expected, found = ours.load(row), theirs.load(theirs.row(row.row_id))
            assert torch.equal(expected.ids, found.ids) and torch.equal(expected.mask, found.mask)
            for one, other in ((expected.taps, found.taps), (expected.last, found.last)):
                largest = one.float().abs().amax(-1, keepdim=True)
                error = (one.float() - other.float()).abs() / one.float().abs().maximum(largest * 2.0**-7)
                worst = max(worst, float(error.max()))
    print(f"largest error relative to the state, or to a 128th of its row's largest: {worst:.5f}")  # noqa: T201
    assert worst <= ROUNDING


def test_training_on_what_vllm_streams_is_training_on_stored_features_though_it_is_killed_three_times(
    cases: EngineCases, answers: Conversations, server: dict[str, Any], tmp_path: Path
) -> None:
    stored = record_features(cases.target, answers, ctx=context(tmp_path / "ours"))
    features = features_from_server(cases.target, answers, **server, storage="none", ctx=context(tmp_path / "features"))

    def train(ctx: Context, features: Features = features) -> Draft:
        return train_draft(cases.target, features, **TRAINING, ctx=ctx)

    for after in (1, 3, 2):  # steps of each attempt; checkpoints are two apart
        assert run_killed(train, tmp_path / "out", after)
    train(context(tmp_path / "out"))
    assert 18 <= requests_ended(server["base_url"]) <= 18 + 3 * FLIGHT
    train(context(tmp_path / "stored"), stored)
    one, other = (torch.tensor(losses(tmp_path / name)) for name in ("out", "stored"))
    print(f"largest difference of a loss: {float(((one - other) / other).abs().max()):.2e}")  # noqa: T201
    torch.testing.assert_close(one, other, rtol=5e-3, atol=0.0)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["loss"] for row in rows if "loss" in row]
