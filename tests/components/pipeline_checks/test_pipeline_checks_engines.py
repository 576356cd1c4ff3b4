"""`check` says which engine could not serve which drafter, with the line of the promise, before anything is trained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from components.contract import UserError
from components.engines.profiles import ENGINES, GIVEN_MODEL, OWN_MTP, formats_for, profile_of
from components.methods import METHODS
from components.targets.source import find_folder
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec

PIPELINE = """\
pipelines:
  serve:
    about: One drafter for each method.
    steps:
      target:   {{uses: targets.load_target, with: {{model: "{model}"}}}}
      trial:
        uses: publish.try_release
        in: {{target: target}}
        with:
          methods: [{methods}]
          settings: {settings}
          engines: [{engines}]
"""
RELEASE = """\
pipelines:
  serve:
    about: One drafter for each method.
    steps:
      target:   {{uses: targets.load_target, with: {{model: builtin}}}}
      prompts:  {{uses: data.collect_prompts, with: {{source: python-stdlib}}}}
      answers:  {{uses: data.write_answers, in: {{target: target, prompts: prompts}}}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      draft:
        uses: drafts.train_draft
        in: {{target: target, features: features}}
        matrix: {{method: [{methods}]}}
        with: {{method: "${{matrix.method}}"}}
      seen:     {{uses: bench.measure_acceptance, in: {{target: target, draft: draft, prompts: prompts}}}}
      cost:     {{uses: bench.measure_step_cost, in: {{target: target, drafts: draft, prompts: prompts}}}}
      depth:    {{uses: speedup.choose_depth, in: {{acceptance: seen, cost: cost}}}}
      timed:
        uses: bench.compare_end_to_end
        in: {{target: target, drafts: draft, prompts: prompts, policy: depth}}
      release:
        uses: publish.export_release
        in: {{target: target, drafts: draft, policy: depth, acceptance: seen, end_to_end: timed}}
        with:
          engines: [{engines}]
"""


def checked(tmp_path: Path, text: str) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(text)
    check_spec(load_spec(file), outside=lambda name: "Draft")


def trial(methods: str, engines: str, model: str = "builtin", settings: dict[str, Any] | None = None) -> str:
    return PIPELINE.format(model=model, methods=methods, engines=engines, settings=json.dumps(settings or {}))


@pytest.mark.parametrize(
    ("methods", "engines", "settings", "said"),
    [
        ("eagle3", "sglang", {"eagle3": {"fc_norm": True}}, "SGLang drops fc_norm .EAGLE-3.1. without a word"),
        ("p-eagle", "llama.cpp", {}, "llama.cpp does not serve p-eagle .its converter takes EAGLE drafters of one"),
        ("lookahead", "vllm", {}, "vLLM does not serve lookahead"),
        ("eagle1", "vllm", {}, r"fc_bias is true: say settings: \{eagle1: \{fc_bias: false\}\}"),
        ("mtp", "vllm", {}, "mtp_modules is 3: say settings"),
        ("mtp", "sglang", {}, r"say settings: \{mtp: \{start: own\}\}"),
        ("mtp", "vllm", {"mtp": {"mtp_modules": 1, "intermediate_size": 64}}, "intermediate_size is 64: say settings"),
        ("mtp", "transformers", {"mtp": {"start": "own"}}, "for Glm4MoeForCausalLM, DeepseekV3ForCausalLM only"),
        ("medusa", "tensorrt-llm", {}, "TensorRT-LLM does not serve medusa"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_one_line_with_its_remedy(
    methods: str, engines: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said) as error:
        checked(tmp_path, trial(methods, engines, settings=settings))
    assert str(error.value).startswith("pipelines.yaml:12: step 'trial': "), error.value
    assert "\n" not in str(error.value)


def test_what_all_named_engines_serve_is_let_through(tmp_path: Path) -> None:
    checked(tmp_path, trial("eagle3", "vllm, sglang, llama.cpp, tensorrt-llm, speculators"))
    checked(tmp_path, trial("eagle3", "vllm, speculators", settings={"eagle3": {"fc_norm": True}}))
    checked(tmp_path, trial("eagle1", "vllm", settings={"eagle1": {"fc_bias": False}}))
    checked(tmp_path, trial("mtp", "vllm", settings={"mtp": {"mtp_modules": 1}}))
    checked(tmp_path, trial("mtp", "vllm, sglang", settings={"mtp": {"start": "own"}}))
    checked(tmp_path, trial("lookahead, mtp-parallel", ""))


def test_limits_of_the_target_are_said_where_its_config_is_on_this_machine(tmp_path: Path) -> None:
    config = json.loads((find_folder("builtin") / "config.json").read_text())
    for theta, refused in ((10000.0, False), (500000.0, True)):
        folder = tmp_path / f"target-{theta:g}"
        folder.mkdir()
        rope = {"rope_type": "default", "rope_theta": theta}
        (folder / "config.json").write_text(json.dumps({**config, "rope_theta": theta, "rope_parameters": rope}))
        text = trial("eagle3", "mnn", model=str(folder))
        if not refused:
            checked(tmp_path, text)
            continue
        with pytest.raises(UserError, match="MNN rotates every drafter by rope_theta 10000, and the target's is 5000"):
            checked(tmp_path, text)
    checked(tmp_path, trial("eagle3", "mnn", model="some/hub-model"))  # nobody knows yet: the dry run will say


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}, r"scaled \(yarn\)"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, r"scaled \(linear\)"),
        ({"partial_rotary_factor": 0.5}, r"scaled \(partial_rotary_factor 0\.5\)"),
        ({}, ""),
    ],
)
def test_a_new_module_in_vllm_wants_a_target_whose_rope_is_not_scaled(
    rope: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = json.loads((find_folder("builtin") / "config.json").read_text())
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **rope}))
    checked(tmp_path, trial("eagle3", "vllm", model=str(folder)))  # its own config says how it is rotated
    text = trial("mtp", "vllm", settings={"mtp": {"mtp_modules": 1}}, model=str(folder))
    if not said:
        checked(tmp_path, text)
        return
    with pytest.raises(UserError, match=rf"vLLM 0\.32\.0 rotates mtp by the target's own RoPE, which is {said}"):
        checked(tmp_path, text)


@pytest.mark.parametrize(
    ("architecture", "method", "engine", "refused"),
    [
        ("Phi3ForCausalLM", "eagle3", "vllm", False),
        ("Phi3ForCausalLM", "eagle3", "llama.cpp", True),
        ("OlmoForCausalLM", "eagle3", "vllm", True),
        ("OlmoForCausalLM", "eagle1", "vllm", False),
        ("", "eagle3", "vllm", False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_only_drafters_that_tap_layers_ask_for_a_target_that_can_be_tapped(
    architecture: str, method: str, engine: str, refused: bool, nested: bool, tmp_path: Path
) -> None:
    config = json.loads((find_folder("builtin") / "config.json").read_text())
    del config["architectures"]
    named = {"architectures": [architecture]} if architecture else {}
    written = {"text_config": config, **named} if nested else {**config, **named}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(written))
    text = trial(method, engine, model=str(tmp_path / "target"), settings={"eagle1": {"fc_bias": False}})
    if not refused:
        return checked(tmp_path, text)
    with pytest.raises(UserError, match=f"no EAGLE taps for {architecture}"):
        checked(tmp_path, text)
    return None


def test_the_drafters_wired_into_a_release_are_those_it_promises(tmp_path: Path) -> None:
    checked(tmp_path, RELEASE.format(methods="eagle3, p-eagle", engines="vllm, speculators"))
    with pytest.raises(UserError) as error:
        checked(tmp_path, RELEASE.format(methods="eagle3, p-eagle, ngram", engines="vllm, mnn"))
    lines = str(error.value).splitlines()
    assert len(lines) == 1, "each engine and drafter is named once"
    assert lines[0].startswith("pipelines.yaml:24: step 'release': draft[p-eagle]: MNN does not serve p-eagle")


def test_engines_that_cannot_tap_the_layers_of_the_features_are_named_before_anything_is_recorded(
    tmp_path: Path,
) -> None:
    """The built-in target has eight layers, whose usual taps may be named as well."""
    release = RELEASE.format(methods="eagle3", engines="vllm, sglang")
    wired = "in: {target: target, answers: answers}"

    def tapping(layers: str) -> str:
        return release.replace(wired, f"{wired}, with: {{tap_layers: {layers}}}")

    for layers in ("null", "[2, 4, 5]", "[1, 3, 5]"):
        checked(tmp_path, tapping(layers))
    for layers in ("[6]", "[1, 2, 3, 5, 7]"):
        with pytest.raises(UserError, match=re.escape(f"SGLang taps 3 layers, and tap_layers names {layers}")):
            checked(tmp_path, tapping(layers))
    for layers in ("[]", "[0, 1]", "[5, 3]", "[3, 3]"):
        with pytest.raises(UserError, match="must be different layers from 1 on, ascending"):
            checked(tmp_path, tapping(layers))


def test_every_engine_knows_every_method_one_way_or_the_other() -> None:
    kinds = {*METHODS, OWN_MTP, GIVEN_MODEL}
    for engine in ENGINES:
        profile = profile_of(engine)
        assert not set(profile.methods) & set(profile.unsupported)
        assert {*profile.methods, *profile.unsupported} <= kinds
        for kind, served in profile.methods.items():
            settings = {"start": "own"} if kind == OWN_MTP else {"model": "m"} if kind == GIVEN_MODEL else {}
            method = {OWN_MTP: "mtp", GIVEN_MODEL: "draft-model"}.get(kind, kind)
            assert formats_for(method, settings, [engine]) == served.formats[:1]


def test_a_check_that_knows_the_engines_starts_nothing_heavy_and_is_quick(tmp_path: Path) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(trial("eagle3", "vllm, sglang, llama.cpp"))
    program = (
        "import sys\nfrom pathlib import Path\nfrom flows.spec.schema import load_spec\n"
        "from flows.planning.wiring import check_spec\n"
        f"check_spec(load_spec(Path({str(file)!r})), outside=lambda name: 'Draft')\n"
        "print([module for module in ('torch', 'transformers', 'safetensors', 'numpy') if module in sys.modules])"
    )
    start = time.process_time()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert time.process_time() - start < 5


@pytest.mark.parametrize(("size", "cut"), [(0, True), (2048, True), (4096, False)])
def test_engines_that_draft_from_the_whole_head_are_named_before_a_part_of_it_is_trained(
    tmp_path: Path, size: int, cut: bool
) -> None:
    text = trial("dflash", "sglang").replace("methods:", f"draft_vocab_size: {size}\n          methods:")
    if not cut:
        checked(tmp_path, text)
        return
    with pytest.raises(UserError, match="SGLang drafts from the target's whole LM head"):
        checked(tmp_path, text)
