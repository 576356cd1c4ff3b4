"""No engine is told how to run a drafter that it cannot load: by no policy, no release, and not on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny_formats import SETTINGS

from components.contract import DepthPolicy, Draft
from components.drafts import METHODS
from components.engines.depth_settings import ENGINE_OF_SETTING, engine_settings, engines_without_method, settings_for
from components.engines.launch import LAUNCHED, cannot_load, not_served
from components.engines.profiles import DEFAULT_FORMATS, GGUF_BASES, kind_of, profile_of, refusals
from components.publish.formats.interface import Source, facts_of

Export = Callable[..., Any]
WORDS = (
    "num_speculative_tokens",
    "--speculative-num-steps",
    "max_draft_len",
    "--spec-draft-n-max",
    "draft_predict_length",
)


def test_a_policy_gives_no_command_for_any_engine(evidence: dict[str, Any]) -> None:
    policy = evidence["policy"].path
    said = (policy / "policy.json").read_text() + (policy / "policy.md").read_text()
    assert json.loads((policy / "policy.json").read_text())["winner"] is not None
    assert [word for word in WORDS if word in said] == []


@pytest.mark.parametrize("method", METHODS)
def test_engines_that_take_no_drafter_of_a_method_are_told_nothing(method: str) -> None:
    without = engines_without_method(method)
    for engine in set(ENGINE_OF_SETTING.values()):
        refused = [*refusals(engine, method, SETTINGS.get(method, {}))]
        kind = kind_of(method, SETTINGS.get(method, {}))
        assert refused or engine not in without, (method, engine)
        assert kind in profile_of(engine).methods or engine in without or method == "mtp", (method, engine)
    raw = {"winner": {"draft_key": "d", "method": method}, "verdict": "use", "choices": [_choice(method)]}
    told = engine_settings(raw, without)
    assert {ENGINE_OF_SETTING[name] for name in told if name in ENGINE_OF_SETTING} == {
        *ENGINE_OF_SETTING.values()
    } - without


def test_a_drafter_that_nobody_knows_here_is_told_to_all() -> None:
    assert engines_without_method("my drafter, measured elsewhere") == set()
    assert {"mnn", "llama.cpp", "sglang", "tensorrt-llm"} <= engines_without_method("medusa")
    assert engines_without_method("mtp") == {"mnn"}, "a checkpoint's own module is served by the others"


def _choice(method: str) -> dict[str, Any]:
    row = dict.fromkeys(("p_beats_no_spec", "speedup_pred", "pred_lo", "pred_hi", "tolerance"), 1.0)
    row |= dict.fromkeys(("speedup_meas", "meas_lo", "meas_hi", "pred_error"))
    row |= {"selection_id": "s", "target_key": "t", "draft_key": "d", "method": method, "workload": "all"}
    return {**row, "batch_size": 1, "depth_k": 2, "rule": "", "verdict": "use", "reasons": []}


@pytest.mark.parametrize("method", SETTINGS)
def test_a_release_tells_engines_exactly_what_its_card_says_they_can_load(
    method: str,
    export: Export,
    saved: Callable[..., Draft],
    changed: Callable[..., DepthPolicy],
    evidence: dict[str, Any],
    source: Source,
) -> None:
    """A drafter of each method stands in for the winner: who cannot load it is told nothing."""
    winner = json.loads((evidence["policy"].path / "policy.json").read_text())["winner"]
    release = export(only=[saved(method)], policy=changed(winner={**winner, "method": method}))
    record = json.loads((release.path / "release.json").read_text())
    told = {ENGINE_OF_SETTING[name] for name in record["engines"] if name in ENGINE_OF_SETTING}
    formats = {facts["format"] for facts in record["formats"].values()}
    for engine in set(ENGINE_OF_SETTING.values()):
        served = profile_of(engine).methods.get(kind_of(method, record["settings"]))
        refused = any(refusals(engine, method, record["settings"], facts_of(source.shape)))
        base = {GGUF_BASES[method]} if engine == "llama.cpp" and method in GGUF_BASES else set()
        readable = served is not None and bool(formats & ({*served.formats} | base))
        assert (engine in told) is (readable and not refused), (method, engine)
    card = (release.path / "README.md").read_text()
    for title, engine in LAUNCHED.items():
        assert (title in record["launch"]) is (engine in told), (method, title)
        assert (f"Not in {title}: " in card) <= (engine not in told)
    words = {"sglang": "--speculative-num-steps", "llama.cpp": "--spec-draft-n-max", "vllm": "num_speculative_tokens"}
    for engine, word in words.items():
        assert (word in card) is (engine in told), (method, engine)


def test_a_format_that_is_not_in_the_release_is_loaded_by_nobody(source: Source) -> None:
    target = facts_of(source.shape)
    settings = {**SETTINGS["medusa"]}
    with_it = cannot_load("medusa", settings, target, None, DEFAULT_FORMATS["medusa"], {})
    without = cannot_load("medusa", settings, target, None, (), {})
    assert "vllm" not in with_it and without == {*ENGINE_OF_SETTING.values()}
    refused = not_served("medusa", settings, target, None, DEFAULT_FORMATS["medusa"])
    assert {"SGLang", "llama.cpp"} <= refused.keys() and {"sglang", "llama.cpp"} <= with_it
    told = settings_for("medusa", {1: 2})
    assert set(told) - {"measured_batch_sizes"} <= set(ENGINE_OF_SETTING)
