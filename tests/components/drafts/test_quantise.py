"""A quantised drafter is the drafter within half a step of every weight, is told apart, and opens like any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_drafts import saved_draft
from tiny_drafts import TRAINED, batch_of, new_context, new_draft

from components.contract import Draft, UserError
from components.drafts import quantise_draft
from components.drafts.storage.files import open_draft, read_draft, read_record
from components.drafts.storage.quantisation import (
    dequantise,
    is_linear,
    layer_of,
    packed_layers,
    quantise,
)
from components.drafts.training.from_features import read_warm_start
from components.targets.interface import AbstractTarget
from flows.planning.step_signature import resolve

MakeTarget = Callable[[str], AbstractTarget]


def made(folder: Path, target: AbstractTarget, method: str) -> Draft:
    return saved_draft(folder, new_draft(target, method), {}, target, held_out_al=2.0)


@pytest.mark.parametrize("method", TRAINED)
def test_a_quantised_drafter_opens_as_its_rounded_weights_and_drafts(
    method: str, tiny_target: MakeTarget, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    draft = made(tmp_path / "draft", target, method)
    out = quantise_draft(draft, weights="int8", keep=["fc"], ctx=new_context(tmp_path / "int8"))
    _, before = read_draft(draft.path)
    _, after = read_draft(out.path)
    stored = load_file(out.path / "model.safetensors")
    assert after.keys() == before.keys()
    packed = {name for name, tensor in before.items() if is_linear(name, tensor) and layer_of(name) != "fc"}
    assert packed_layers(stored).keys() == packed != set()
    for name, tensor in before.items():
        wanted = dequantise(*quantise(tensor, 8)) if name in packed else tensor.to(after[name].dtype)
        wanted = wanted.bfloat16().float() if name not in packed and tensor.is_floating_point() else wanted
        assert torch.equal(after[name], wanted), name
    opened: Any = open_draft(out, target)
    assert all(torch.equal(tensor, after[name]) for name, tensor in opened.state_dict().items())
    batch = batch_of(target, 1)
    guesses = opened.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], 2).tokens
    assert guesses.shape[0] == batch.ids.shape[1] - 1
    record = read_record(out.path)
    assert record["quantised_from"] == draft.key and "held_out_al" not in record
    assert out.info["weights"].startswith("int8") and out.info["method"] == method


def test_int4_takes_a_quarter_of_bf16_and_bf16_half_of_float32(tiny_target: MakeTarget, tmp_path: Path) -> None:
    draft = made(tmp_path / "draft", tiny_target("llama"), "eagle3")
    whole = (draft.path / "model.safetensors").stat().st_size
    sizes = {}
    for weights_, size in (("bf16", None), ("int8", None), ("int4", 16)):
        ctx = new_context(tmp_path / weights_)
        out = quantise_draft(draft, weights=weights_, group_size=size, keep=[], ctx=ctx)  # type: ignore[arg-type]
        sizes[weights_] = out.info["weight_bytes"]
    assert sizes["bf16"] < 0.55 * whole
    assert sizes["int8"] < 0.65 * sizes["bf16"] and sizes["int4"] < 0.75 * sizes["int8"]


def test_training_goes_on_from_the_rounded_weights(tiny_target: MakeTarget, tmp_path: Path) -> None:
    draft = made(tmp_path / "draft", tiny_target("llama"), "eagle3")
    out = quantise_draft(draft, weights="int8", ctx=new_context(tmp_path / "out"))
    start = read_warm_start(out, "eagle3", 0, tiny_target("llama"))
    assert torch.equal(start.weights["fc.weight"], read_draft(out.path)[1]["fc.weight"])


def test_what_cannot_be_quantised_is_refused_in_one_line(tiny_target: MakeTarget, tmp_path: Path) -> None:
    draft = made(tmp_path / "draft", tiny_target("llama"), "eagle3")
    linear = sorted({layer_of(n) for n, t in read_draft(draft.path)[1].items() if is_linear(n, t)})
    for wrong, why in (
        ({"weights": "int4", "group_size": 40}, "do not divide"),
        ({"keep": linear}, "every linear layer"),
    ):
        with pytest.raises(UserError, match=why) as refused:
            quantise_draft(draft, ctx=new_context(tmp_path / why), **wrong)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"no layer lmhead to keep; it has .*lm_head"):
        quantise_draft(draft, keep=["lmhead"], ctx=new_context(tmp_path / "misspelt"))
    once = quantise_draft(draft, ctx=new_context(tmp_path / "once"))
    with pytest.raises(UserError, match="stored in int8 already"):
        quantise_draft(once, ctx=new_context(tmp_path / "twice"))
    lookup = tmp_path / "ngram"
    lookup.mkdir()
    (lookup / "draft.json").write_text(json.dumps({"format": 1, "method": "ngram", "settings": {}, "trained": False}))
    with pytest.raises(UserError, match="no weights of its own"):
        quantise_draft(Draft(key="n", path=lookup), ctx=new_context(tmp_path / "none"))


@pytest.mark.parametrize("damage", ["scale gone", "scale nan", "scale negative", "shape", "words", "bits"])
def test_a_damaged_quantised_drafter_is_refused(damage: str, tiny_target: MakeTarget, tmp_path: Path) -> None:
    draft = made(tmp_path / "draft", tiny_target("llama"), "eagle3")
    out = quantise_draft(draft, ctx=new_context(tmp_path / "out"))
    file = out.path / "model.safetensors"
    tensors = load_file(file)
    module = "midlayer.mlp.up_proj"
    if damage == "scale gone":
        del tensors[f"{module}.weight_scale"]
    elif damage.startswith("scale"):
        tensors[f"{module}.weight_scale"][0] = float("nan") if damage.endswith("nan") else -1.0
    elif damage == "shape":
        tensors[f"{module}.weight_shape"][1] += 4
    elif damage == "words":
        tensors[f"{module}.weight_packed"] = tensors[f"{module}.weight_packed"][:, 1:].contiguous()
    else:
        record = read_record(out.path)
        record["storage"]["weights"] = "int4"
        (out.path / "draft.json").write_text(json.dumps(record))
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"model\.safetensors") as refused:
        open_draft(out, tiny_target("llama"))
    assert "\n" not in str(refused.value)


def test_the_key_holds_what_was_resolved_and_nothing_that_makes_no_difference() -> None:
    step = resolve("drafts.quantise_draft")
    assert step.settings({"weights": "int4"})[0] == step.settings({"weights": "int4", "group_size": 32})[0]
    assert step.settings({"weights": "int8"})[0] != step.settings({"weights": "int8", "group_size": 32})[0]
    assert step.settings({"weights": "bf16", "keep": ["fc"]})[0] == step.settings({"weights": "bf16"})[0]
    assert step.settings({"keep": ["fc", "lm_head"]})[0] == step.settings({"keep": ["lm_head", "fc"]})[0]
    for wrong in ({"weights": "int2"}, {"weights": "bf16", "group_size": 32}, {"group_size": 12}, {"group_size": -1}):
        assert step.settings(wrong)[1], wrong


@pytest.mark.parametrize("weights_", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.4e38])
def test_what_no_engine_can_hold_is_refused_before_it_is_stored(
    weights_: str, value: float, tiny_target: MakeTarget, tmp_path: Path
) -> None:
    draft = made(tmp_path / "d", tiny_target("llama"), "eagle3")
    tensors = load_file(draft.path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up_proj.weight"))
    tensors[name][0, 0] = value
    save_file(tensors, draft.path / "model.safetensors")
    ctx = new_context(tmp_path / "q")
    with pytest.raises(UserError, match=f"{name} holds NaN(, or what bfloat16 calls| or) infinity"):
        quantise_draft(draft, weights=weights_, group_size=None, ctx=ctx)  # type: ignore[arg-type]
    assert not (ctx.out / "model.safetensors").exists()
