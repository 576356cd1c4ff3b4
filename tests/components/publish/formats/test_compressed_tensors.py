"""A drafter in few bits goes out as compressed-tensors says, is checked exactly, and comes back as it was measured."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_drafts import saved_draft
from tiny_formats import SETTINGS
from torch import Tensor

from components.contract import Context, Draft, UserError
from components.drafts import quantise_draft
from components.drafts.storage.files import open_draft, read_draft
from components.drafts.storage.quantisation import PACKED
from components.publish.formats.interface import Source
from components.publish.formats.registry import read_drafter_state, read_folder, reopen_drafter, write_format
from components.publish.release.validate import validate_folder
from components.targets.interface import AbstractTarget

Quantised = Callable[..., Draft]


FORMS = [
    ("eagle3", "eagle3"),
    ("speculators", "eagle3"),
    ("eagle1", "eagle1"),
    ("mtp", "mtp"),
    ("causal-lm", "draft-model"),
]


@pytest.fixture(scope="module")
def quantised(networks: Any, opened: AbstractTarget, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """A drafter of a method whose weights were rounded."""

    def make(method: str, **settings: Any) -> Draft:
        folder = tmp_path_factory.mktemp(method)
        before = saved_draft(folder, networks(method, SETTINGS[method]), SETTINGS[method], opened)
        out = tmp_path_factory.mktemp(f"{method}-rounded")
        ctx = Context(key="q" * 64, out=out, scratch=out, num_threads=1)
        made = quantise_draft(before, ctx=ctx, **settings)
        return Draft(key="q" * 64, path=made.path, info=made.info)

    return make


@pytest.mark.parametrize(("name", "method"), FORMS)
@pytest.mark.parametrize("how", [{"weights": "int8"}, {"weights": "int4", "group_size": 16}, {"weights": "bf16"}])
def test_what_goes_out_comes_back_with_the_measured_weights(
    name: str,
    method: str,
    how: dict[str, Any],
    quantised: Quantised,
    source: Source,
    opened: AbstractTarget,
    tmp_path: Path,
) -> None:
    draft = quantised(method, **how, keep=["lm_head", "fc"])
    facts = write_format(name, read_drafter_state(draft.path), source, tmp_path / "out")
    assert read_folder(tmp_path / "out", source.shape)[0] == name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("torch_dtype", config.get("dtype", "bfloat16")) == "bfloat16"
    if how["weights"] == "bf16":
        assert facts["dtype"] == "bfloat16" and "quantization_config" not in config
    else:
        assert facts["dtype"].startswith(how["weights"])
        (group,) = config["quantization_config"]["config_groups"].values()
        assert group["targets"] == ["Linear"] and group["weights"]["num_bits"] == int(how["weights"][3:])
    again: Any = reopen_drafter(tmp_path / "out", opened, source)
    ours = read_draft(draft.path)[1]
    for name_, tensor in again.state_dict().items():
        if (name, name_) == ("eagle1", "fc.weight"):  # it holds the embedding's norm as well, and is rounded again
            torch.testing.assert_close(tensor, ours[name_], rtol=0.01, atol=0)
        elif name_ != "lm_head.weight":  # of some formats it has a row for every token
            assert torch.equal(tensor, ours[name_]), name_
    if name in ("eagle3", "speculators"):
        assert torch.equal(again.lm_head.weight, ours["lm_head.weight"])
        mine: Any = open_draft(draft, opened)
        ids = torch.arange(3, 23)
        out = opened.forward(ids[None], opened.new_cache(1, 20), logits="none", features=True)
        assert out.taps is not None and out.last is not None
        guesses = [one.propose_at_every_position(ids, out.taps[0], out.last[0], 3).tokens for one in (mine, again)]
        assert torch.equal(*guesses)


def test_a_quantised_lm_head_is_named_because_engines_mean_other_layers_by_linear(
    quantised: Quantised, source: Source, tmp_path: Path
) -> None:
    draft = quantised("eagle3", weights="int8", keep=[])
    write_format("eagle3", read_drafter_state(draft.path), source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear", "re:.*lm_head$"] and config["quantization_config"]["ignore"] == []
    assert any("sound eagle3 checkpoint" in line and "int8" in line for line in validate_folder(tmp_path / "out"))
    group["targets"] = ["Linear"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="lm_head is neither ignored nor a target"):
        read_folder(tmp_path / "out", source.shape)


def test_a_format_that_changes_a_quantised_weight_says_which_to_keep(
    quantised: Quantised, source: Source, tmp_path: Path
) -> None:
    draft = quantised("draft-model", weights="int8", keep=[])
    with pytest.raises(UserError, match=r"lm_head\.weight changed.*keep: \[lm_head\]"):
        write_format("causal-lm", read_drafter_state(draft.path), source, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written before the check has passed"


def test_a_format_that_adds_a_layer_does_not_say_the_drafter_was_cut_short(
    quantised: Quantised, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "medusa", {"num_heads": 2, "head": "tied"})
    draft = quantised("medusa", weights="int8")
    with pytest.raises(UserError, match=r"the format adds 0\.1\.weight, which is not in int8"):
        write_format("medusa", read_drafter_state(draft.path), source, tmp_path / "out")


def test_a_release_holds_the_rounded_drafter_and_says_so(
    drafts: dict[str, Draft], policy_for: Callable[[str], Any], export: Callable[..., Any], tmp_path: Path
) -> None:
    policy, draft = policy_for("eagle3"), drafts["eagle3"]
    ctx = Context(key=draft.key, out=tmp_path / "q", scratch=tmp_path / "q", num_threads=1)
    (tmp_path / "q").mkdir()
    made = quantise_draft(draft, weights="int8", ctx=ctx)
    rounded = Draft(key=draft.key, path=made.path, info=made.info)
    file = policy.path / "policy.json"
    raw = json.loads(file.read_text())
    cost = {
        "draft_key": draft.key,
        "quantised_from": "o" * 64,
        "method": "eagle3",
        "weights": "int8, a scale for each output channel",
        "depth_k": 3,
        "num_prompts": 32,
        "al": 2.41,
        "al_lo": 2.3,
        "al_hi": 2.5,
        "al_before": 2.42,
        "change": -0.01,
        "change_lo": -0.03,
        "change_hi": 0.01,
        "verdict": "undecided",
    }
    file.write_text(json.dumps(raw | {"weights": [cost]}))
    release = export(policy=policy, only=[rounded], engines=["vllm"])
    card = (release.path / "README.md").read_text()
    assert "-0.010 [-0.030, +0.010]" in card and "no difference shown" in card
    assert any(name.endswith(PACKED) for name in load_file(release.path / "eagle3" / "model.safetensors"))
    with pytest.raises(UserError, match="MNN takes no drafters quantised here to int8"):
        shutil.rmtree(release.path)
        export(policy=policy, only=[rounded], engines=["mnn"])


Change = Callable[[dict[str, Tensor], dict[str, Any], random.Random], None]


def _module(tensors: dict[str, Tensor], rng: random.Random) -> str:
    return rng.choice(sorted(name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)))


def _scale(value: float) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
        tensors[f"{_module(tensors, rng)}.weight_scale"].view(-1)[0] = value

    return change


def _drop(ending: str) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
        del tensors[_module(tensors, rng) + ending]

    return change


def _narrow(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
    name = _module(tensors, rng) + PACKED
    tensors[name] = tensors[name][:, 1:].contiguous()


def _as_floats(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
    name = _module(tensors, rng) + PACKED
    tensors[name] = tensors[name].float()


def _swapped(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
    name = f"{_module(tensors, rng)}.weight_shape"
    tensors[name] = tensors[name] + torch.tensor([0, 1])


def _told(**changes: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
        config["quantization_config"] |= changes

    return change


def _of_weights(**changes: Any) -> Change:
    def change(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes

    return change


def _activations(tensors: dict[str, Tensor], config: dict[str, Any], rng: random.Random) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}


WRONG: dict[str, Change] = {
    "scale nan": _scale(float("nan")),
    "scale infinite": _scale(float("inf")),
    "scale zero": _scale(0.0),
    "scale negative": _scale(-0.5),
    "no scale": _drop(".weight_scale"),
    "no codes": _drop(PACKED),
    "no shape": _drop(".weight_shape"),
    "narrow": _narrow,
    "floats": _as_floats,
    "another shape": _swapped,
    "activations": _activations,
    "gptq": _told(quant_method="gptq"),
    "format": _told(format="int-quantized"),
    "cache": _told(kv_cache_scheme={"num_bits": 8}),
    "sparse": _told(sparsity_config={"a": 1}),
    "not compressed": _told(quantization_status="frozen"),
    "ignores a word": _told(ignore="fc"),
    "ignores less": _told(ignore=[]),
    "ignores more": _told(ignore=["re:.*fc$", "re:.*lm_head$", "re:.*up_proj$"]),
    "ignores by a program": _told(ignore=["re:(a+)+$"]),
    "no groups": _told(config_groups={}),
    "other bits": _of_weights(num_bits=8),
    "three bits": _of_weights(num_bits=3),
    "float": _of_weights(type="float"),
    "asymmetric": _of_weights(symmetric=False),
    "dynamic": _of_weights(dynamic=True),
    "by channel": _of_weights(strategy="channel", group_size=None),
    "another group": _of_weights(group_size=8),
    "group that does not divide": _of_weights(group_size=24),
    "group of words": _of_weights(group_size="16"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_spoiled_quantised_checkpoint_is_refused_in_one_line(
    kind: str, quantised: Quantised, source: Source, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    write_format("eagle3", read_drafter_state(quantised("eagle3", weights="int4", group_size=16).path), source, good)
    read_folder(good, source.shape)
    tensors, config = load_file(good / "model.safetensors"), json.loads((good / "config.json").read_text())
    WRONG[kind](tensors, config, random.Random(kind))
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    save_file(tensors, spoiled / "model.safetensors", metadata={"format": "pt"})
    (spoiled / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        read_folder(spoiled, source.shape)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 400 and said.startswith("spoiled"), said
