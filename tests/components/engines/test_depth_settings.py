"""No engine is told how to run a drafter that it cannot load: by no policy, no release, and not on the terminal."""

from __future__ import annotations

import dataclasses

import pytest

from components.engines.depth_settings import ENGINE_OF_SETTING, engine_settings, engines_without_method, settings_for
from components.engines.profiles import kind_of, profile_of, refusals
from components.methods import METHODS
from components.policy import Policy, StopChoice, Winner
from components.rows import DepthChoice

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
