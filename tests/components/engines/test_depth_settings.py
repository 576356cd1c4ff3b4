"""No engine is told how to run a drafter that it cannot load: by no policy, no release, and not on the terminal."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import Any

import pytest

from components.engines.depth_settings import (
    ENGINE_OF_SETTING,
    engine_settings,
    engines_without_method,
    setting_files,
    settings_for,
)
from components.engines.profiles import kind_of, profile_of, refusals
from components.methods import METHODS
from components.policy import Policy, StopChoice, Winner
from components.rows import DepthChoice, DepthEval

SETTINGS: dict[str, dict[str, object]] = {
    "eagle1": {"fc_bias": True},
    "hass": {"fc_bias": False},
    "mtp": {"mtp_modules": 3, "first_hidden": "post_norm"},
}


def policy_for(method: str) -> Policy:
    """Draft two tokens with one drafter at batch size 1."""
    choice = DepthChoice(
        "s", "t", "d", method, "all", 1, 2, "", 1.0, 1.0, 1.0, 1.0, 1.0, None, None, None, None, "use", []
    )
    return Policy(
        *("s", "t", "float32", "plain", "", 0.01),
        *([choice], [], [], [], [], []),
        winner=Winner("d", method, 2),
        verdict="use",
    )


@pytest.mark.parametrize("method", METHODS)
def test_engines_that_take_no_drafter_of_a_method_are_told_nothing(method: str) -> None:
    without, settings = engines_without_method(method), SETTINGS.get(method, {})
    for engine in set(ENGINE_OF_SETTING.values()):
        refused = [*refusals(engine, method, settings)]
        assert refused or engine not in without, (method, engine)
        served = kind_of(method, settings) in profile_of(engine).methods
        assert served or engine in without or method == "mtp", (method, engine)
    settings_by_engine = engine_settings(policy_for(method), without)
    engines = {ENGINE_OF_SETTING[name] for name in settings_by_engine if name in ENGINE_OF_SETTING}
    assert engines == {*ENGINE_OF_SETTING.values()} - without


def test_an_engine_is_told_no_more_draft_tokens_than_it_serves_of_such_a_drafter() -> None:
    """vLLM serves one new MTP module: the release's command drafts one token, and its settings say the same."""
    told = engine_settings(policy_for("mtp"), (), {"start": "new", "mtp_modules": 1})
    assert told["vllm"]["speculative_config"]["num_speculative_tokens"] == 1
    assert told["llama_cpp"]["flags"][3] == "2", "it serves what was chosen"
    own = engine_settings(policy_for("mtp"), (), {"start": "own"})
    assert own["vllm"]["speculative_config"]["num_speculative_tokens"] == 2


def test_a_drafter_that_nobody_knows_here_is_told_to_all() -> None:
    assert engines_without_method("my drafter, measured elsewhere") == set()
    assert {"mnn", "llama.cpp", "sglang", "tensorrt-llm"} <= engines_without_method("medusa")
    assert engines_without_method("mtp") == {"mnn"}, "a checkpoint's own module is served by the others"


def test_vllms_medusa_is_told_the_chosen_depth_though_a_larger_batch_has_a_deeper_one() -> None:
    assert settings_for("medusa", {1: 2, 8: 4})["vllm"]["speculative_config"]["num_speculative_tokens"] == 2
    assert settings_for("medusa", {1: 0, 8: 4})["vllm"]["speculative_config"]["num_speculative_tokens"] == 4
    assert settings_for("eagle3", {1: 2, 8: 4})["vllm"]["speculative_config"]["num_speculative_tokens"] == 4


@pytest.mark.parametrize(("low", "flags"), [(1.01, ["4", "0.55"]), (0.99, ["2", "0"]), (None, ["2", "0"])])
def test_llama_cpp_ends_drafts_by_a_threshold_only_where_that_was_measured_to_be_faster(
    low: float | None, flags: list[str]
) -> None:
    numbers = {f.name: 1 for f in dataclasses.fields(StopChoice)} | {"p_min": 0.55, "p_min_depth": 4}
    stop = StopChoice(**{**numbers, "draft_key": "d", "method": "eagle3", "p_min_meas_lo": low})  # type: ignore[arg-type]
    told = engine_settings(dataclasses.replace(policy_for("eagle3"), stops=[stop]), [])["llama_cpp"]["flags"]
    assert told[told.index("--spec-draft-n-max") + 1 :: 2] == flags


def vllm_depth(config: dict[str, Any], batch_size: int) -> int:
    """As vLLM 0.32.0 looks it up: v1/spec_decode/dynamic/utils.py."""
    rows = config.get("num_speculative_tokens_per_batch_size", [[1, 1, config["num_speculative_tokens"]]])
    assert all(len(row) == 3 and 0 < row[0] <= row[1] and row[2] >= 0 for row in rows)
    assert rows[0][0] == 1 and all(row[1] < following[0] for row, following in itertools.pairwise(rows))
    return min(next((k for _, last, k in rows if batch_size <= last), rows[-1][2]), config["num_speculative_tokens"])


def tensorrt_depth(config: dict[str, Any], batch_size: int) -> int:
    """As TensorRT-LLM 1.3 checks and looks it up: llmapi/llm_args.py."""
    schedule = {
        int(last): depth for last, depth in config.get("draft_len_schedule", {2**31: config["max_draft_len"]}).items()
    }
    assert schedule[min(schedule)] == config["max_draft_len"] >= max(schedule.values()) >= 0 < min(schedule)
    return next((depth for last, depth in sorted(schedule.items()) if batch_size <= last), 0)


def sglang_depth(settings: dict[str, Any], batch_size: int) -> int:
    """As SGLang does (November 2026): speculative/adaptive_spec_params.py and adaptive_step_router.py."""
    flags = settings["flags"]
    config = settings[flags[flags.index("--speculative-adaptive-config") + 1]]
    assert "--speculative-adaptive" in flags and flags[flags.index("--speculative-eagle-topk") + 1] == "1"
    slots = {int(key): entry["candidate_steps"] for key, entry in config.items() if key.isdigit()}
    assert all(steps and all(isinstance(one, int) and one >= 0 for one in steps) for steps in slots.values())
    keys = sorted(slots)
    (depth,) = slots[keys[max(0, bisect.bisect_right(keys, batch_size) - 1)]]
    return depth


@pytest.mark.parametrize("chosen", [{1: 4, 4: 2, 16: 0}, {1: 3, 8: 3}, {2: 1, 8: 3}, {1: 0, 8: 2}])
def test_every_engine_finds_our_depth_of_every_batch_size_in_its_own_form(chosen: dict[int, int]) -> None:
    told = settings_for("eagle3", chosen)
    for batch_size in range(1, max(chosen) + 1):
        ours = chosen[min(measured for measured in chosen if measured >= batch_size)]
        assert vllm_depth(told["vllm"]["speculative_config"], batch_size) == ours
        if "sglang_by_batch_size" in told:
            assert sglang_depth(told["sglang_by_batch_size"], batch_size) == ours
        first = chosen[min(chosen)]
        there = tensorrt_depth(told["tensorrt_llm"]["speculative_config"], batch_size)
        assert there == (min(ours, first) if first else max(chosen.values())), "its first depth is its largest"
    assert ("sglang_by_batch_size" in told) == (len(set(chosen.values())) > 1)
    assert "sglang_by_batch_size" not in settings_for("dflash", chosen), "its block has one width"


def test_block_drafters_get_the_flags_of_their_own_and_a_cost_table_that_sglang_reads() -> None:
    flags = settings_for("dflash", {1: 3})["sglang"]["flags"]
    assert flags == ["--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "4"]
    assert settings_for("dflash", {1: 3})["mnn"]["config"] == {"speculative_type": "dflash"}
    unknown = {field.name: None for field in dataclasses.fields(DepthEval)}
    timed = {"draft_key": "d", "workload": "all", "t_draft_ms": 1.0}
    evals = [
        DepthEval(**{**unknown, **timed, "batch_size": size, "depth_k": depth, "t_verify_ms": 4.0 * size})  # type: ignore[arg-type]
        for size in (1, 4)
        for depth in (0, 1, 3)
    ]
    told = engine_settings(dataclasses.replace(policy_for("dspark"), evals=evals), [])
    flags = told["sglang_costs"]["flags"]
    assert flags[flags.index("--speculative-dspark-block-size") + 1] == "2"
    table = told["sglang_costs"][flags[flags.index("--speculative-dspark-sps-table-path") + 1]]
    assert table == setting_files(told)["sglang-costs.json"]
    assert table["sample_batch_tokens"] == sorted(set(table["sample_batch_tokens"])) == [2, 4, 8, 16]
    assert table["sample_steps_per_sec"] == [200.0, 200.0, 1000 / 17, 1000 / 17] and table["max_batch_tokens"] >= 16
    assert "sglang_costs" not in engine_settings(policy_for("dspark"), []), "nothing was timed"
