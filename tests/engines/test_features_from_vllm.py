"""A real vLLM hands out hidden states: those that we record ourselves but for rounding, each conversation once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving_engine import requests_ended

from benchmarks.engine_cases import EngineCases
from benchmarks.engine_vllm import vllm_process
from components.contract import Context, Features
from components.data import collect_prompts, features_from_server, record_features, write_answers
from components.data.features.format import open_features
from components.engines.hidden_states import CPU_CONNECTOR, CPU_MODULE, server_options
from components.targets.load import target_facts
from components.targets.shape import taps_of
from tests.components.data.killed_step import context, run_killed

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200), pytest.mark.usefixtures("vllm_ready")]

ROOT = Path(__file__).resolve().parents[2]
FLIGHT = 4
ROUNDING = 2.0**-7
"""A bfloat16 has 8 bits: states that differ by float32 rounding alone may round to neighbours."""


def test_vllm_hands_out_the_states_that_we_record_and_a_kill_asks_for_none_twice(
    cases: EngineCases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = collect_prompts(num_train=14, num_validation=4, num_test=0, ctx=context(tmp_path / "prompts"))
    answers = write_answers(cases.target, prompts, max_new_tokens=40, shard_size=7, ctx=context(tmp_path / "answers"))
    ours = open_features(record_features(cases.target, answers, ctx=context(tmp_path / "ours")))
    num_layers = int(target_facts(cases.target)["shape"]["num_layers"])
    folder = tmp_path / "shared"
    folder.mkdir()
    more = server_options([*taps_of(num_layers), num_layers], str(folder), connector=CPU_CONNECTOR, module=CPU_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    out = tmp_path / "out"

    with vllm_process(cases.target_folder, tmp_path / "vllm.log", more) as (address, _):

        def asked(ctx: Context) -> Features:
            settings: dict[str, Any] = {"base_url": address, "folder": str(folder), "concurrency": FLIGHT}
            return features_from_server(cases.target, answers, **settings, wait_s=300.0, ctx=ctx)

        assert run_killed(asked, out, after=9)
        theirs = open_features(asked(context(out)))
        assert 18 <= requests_ended(address) <= 18 + FLIGHT
    assert not list(folder.glob("kept-*"))
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
