"""`check` looks through the step that quantises, before anything is trained; its code is no part of what trains."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from components.contract import UserError
from flows.planning.code_index import reached_symbols
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec

PIPELINE = """\
pipelines:
  serve:
    about: A drafter in few bits.
    steps:
      target:   {{uses: targets.load_target, with: {{model: builtin}}}}
      prompts:  {{uses: data.collect_prompts, with: {{source: python-stdlib}}}}
      answers:  {{uses: data.write_answers, in: {{target: target, prompts: prompts}}}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      trained:  {{uses: drafts.train_draft, in: {{target: target, features: features}}}}
      draft:
        uses: drafts.quantise_draft
        in: {{draft: trained}}
        matrix: {{weights: [{weights}]}}
        with: {{weights: "${{matrix.weights}}"{more}}}
      seen:     {{uses: bench.measure_acceptance, in: {{target: target, draft: draft, prompts: prompts}}}}
      cost:     {{uses: bench.measure_step_cost, in: {{target: target, drafts: draft, prompts: prompts}}}}
      depth:    {{uses: speedup.choose_depth, in: {{acceptance: seen, cost: cost}}}}
      timed:
        uses: bench.compare_end_to_end
        in: {{target: target, drafts: draft, prompts: prompts, policy: depth}}
      release:
        uses: publish.export_release
        in: {{target: target, drafts: draft, policy: depth, acceptance: seen, end_to_end: timed}}
        with: {{engines: [{engines}]}}
"""


def check(folder: Path, weights: str, engines: str, more: str = "") -> None:
    file = folder / "pipelines.yaml"
    file.write_text(PIPELINE.format(weights=weights, engines=engines, more=more))
    check_spec(load_spec(file), outside=lambda _: "Draft")


def test_what_the_engines_take_passes(tmp_path: Path) -> None:
    check(tmp_path, "bf16, int8, int4", "vllm, sglang")
    check(tmp_path, "int8", "llama.cpp", ", group_size: 32, keep: []")


@pytest.mark.parametrize(
    ("weights", "engines", "more", "why"),
    [
        ("int8, int4", "mnn", "", "MNN takes no drafters quantised here to int8"),
        ("int8", "llama.cpp", "", "group_size 32"),
        ("int4", "llama.cpp", ", keep: []", "weights: int8 or bf16"),
        ("int4", "vllm", ", group_size: 16", "group_size 0 or 32 or 64 or 128, not 16"),
        ("int8", "vllm", ", keep: [q_proj]", "quantises q_proj as well"),
    ],
)
def test_what_an_engine_does_not_take_is_refused_before_training(
    weights: str, engines: str, more: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        check(tmp_path, weights, engines, more)


def release(method: str, more: str) -> str:
    text = PIPELINE.replace("in: {{target: target, features: features}}}}", METHOD)
    return text.format(weights="int8", engines="", more=more).replace("METHOD", method)


METHOD = "in: {{target: target, features: features}}, with: {{method: METHOD}}}}"


@pytest.mark.parametrize(
    ("method", "more", "why"),
    [
        ("medusa", "", "a medusa checkpoint holds no weights in int8"),
        ("eagle1", ", keep: [lm_head]", r"holds fc changed, so not in int8: say keep: \[fc, lm_head\]"),
        ("draft-model", ", keep: []", r"holds lm_head changed, so not in int8: say keep: \[lm_head\]"),
        ("eagle3", ", keep: [], group_size: 40", "groups of 40 do not divide the 192 inputs of q_proj"),
        ("eagle3", ", keep: [q_proj], group_size: 40", "groups of 40 do not divide the 576 inputs of down_proj"),
        ("eagle1", "", ""),
        ("draft-model", "", ""),
        ("eagle3", ", keep: [], group_size: 32", ""),
    ],
)
def test_where_no_engine_is_named_the_format_itself_must_hold_it(
    method: str, more: str, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(release(method, more))
    with pytest.raises(UserError, match=why) if why else nullcontext():
        check_spec(load_spec(file), outside=lambda _: "Draft")


def test_how_codes_are_made_is_part_of_quantising_and_of_no_training() -> None:
    """Editing it rounds anew, and leaves every trained drafter where it is."""
    reached = {
        name: reached_symbols(f"components.drafts.{module}", name, frozenset({"eagle3"}), ("components",))
        for module, name in (("train", "train_draft"), ("quantise", "quantise_draft"))
    }
    for symbol in ("quantise", "pack", "quantise_tensors"):
        place = f"components/drafts/storage/quantisation.py: {symbol}"
        assert place in reached["quantise_draft"] and place not in reached["train_draft"]
