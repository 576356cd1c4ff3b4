"""`check` looks through the step that quantises, before anything is trained; its code is no part of what trains."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pipeline_builder import step
from usual_pipeline import USUAL

from components.contract import UserError
from flows.planning.code_index import reached_symbols
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec


def check(folder: Path, weights: str, engines: list[str], method: str = "eagle3", **settings: object) -> None:
    """Check the usual pipeline with its draft, of a method, quantised to each of `weights` before anything uses it."""
    trained = replace(USUAL.steps["draft"], settings={"method": method})
    axis = {"matrix": {"weights": weights.split(", ")}}
    rounding = step("drafts.quantise_draft", {"draft": "trained"}, keys=axis, weights="${matrix.weights}", **settings)
    promised = (
        USUAL.with_steps(trained=trained).with_other_step("draft", rounding).with_setting("release", engines=engines)
    )
    file = folder / "pipelines.yaml"
    file.write_text(promised.text)
    check_spec(load_spec(file), outside=lambda _: "Draft")


def test_what_the_engines_take_passes(tmp_path: Path) -> None:
    check(tmp_path, "bf16, int8, int4", ["vllm", "sglang"])
    check(tmp_path, "int8", ["llama.cpp"], group_size=32, keep=[])


@pytest.mark.parametrize(
    ("weights", "engine", "settings", "why"),
    [
        ("int8, int4", "mnn", {}, "MNN takes no drafters quantised here to int8"),
        ("int8", "llama.cpp", {}, "group_size 32"),
        ("int4", "llama.cpp", {"keep": []}, "weights: int8 or bf16"),
        ("int4", "vllm", {"group_size": 16}, "group_size 0 or 32 or 64 or 128, not 16"),
        ("int8", "vllm", {"keep": ["q_proj"]}, "quantises q_proj as well"),
    ],
)
def test_what_an_engine_does_not_take_is_refused_before_training(
    weights: str, engine: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        check(tmp_path, weights, [engine], **settings)


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("medusa", {}, "a medusa checkpoint holds no weights in int8"),
        ("eagle1", {"keep": ["lm_head"]}, r"holds fc changed, so not in int8: say keep: \[fc, lm_head\]"),
        ("draft-model", {"keep": []}, r"holds lm_head changed, so not in int8: say keep: \[lm_head\]"),
        ("eagle3", {"keep": [], "group_size": 40}, "groups of 40 do not divide the 192 inputs of q_proj"),
        ("eagle3", {"keep": ["q_proj"], "group_size": 40}, "groups of 40 do not divide the 576 inputs of down_proj"),
        ("eagle1", {}, ""),
        ("draft-model", {}, ""),
        ("eagle3", {"keep": [], "group_size": 32}, ""),
    ],
)
def test_where_no_engine_is_named_the_format_itself_must_hold_it(
    method: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why) if why else nullcontext():
        check(tmp_path, "int8", [], method, **settings)


def test_how_codes_are_made_is_part_of_quantising_and_of_no_training() -> None:
    """Editing it rounds anew, and leaves every trained drafter where it is."""
    reached = {
        name: reached_symbols(f"components.drafts.{module}", name, frozenset({"eagle3"}), ("components",))
        for module, name in (("train", "train_draft"), ("quantise", "quantise_draft"))
    }
    for symbol in ("quantise", "pack", "quantise_tensors"):
        place = f"components/drafts/storage/quantisation.py: {symbol}"
        assert place in reached["quantise_draft"] and place not in reached["train_draft"]
