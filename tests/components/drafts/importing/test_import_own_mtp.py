"""A model's own MTP module is a drafter too: read from its checkpoint, or from a copy in which it was fine-tuned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_drafts import context
from own_checkpoints import LAYOUTS, PARTS, make_own_checkpoint
from safetensors.torch import load_file, save_file

from components.contract import Target, UserError
from components.drafts import import_draft
from components.drafts.storage.files import build_draft, open_draft
from components.publish.formats.mtp import stitch
from components.targets import load_target
from components.targets.interface import AbstractTarget
from components.targets.load import open_target


def adopt(target: Target, folder: Path, out: Path) -> Any:
    return import_draft(target, model=str(folder), method="mtp", layout="auto", ctx=context(out))


def guesses(draft: Any, target: AbstractTarget) -> torch.Tensor:
    ids = torch.randint(3, target.shape.vocab_size, (1, 16), generator=torch.Generator().manual_seed(1))
    out = target.forward(ids, target.new_cache(1, 16), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    tokens: torch.Tensor = draft.propose_at_every_position(ids[0], out.taps[0], out.last[0], 2).tokens
    return tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_module_of_a_checkpoint_is_imported_as_itself_and_as_it_was_fine_tuned(layout: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_own_checkpoint(layout, tmp_path / "model")
    artifact = load_target(model=str(folder), ctx=context(tmp_path / "target"))
    target = open_target(artifact, dtype="float32", kernel="plain")
    own: Any = build_draft("mtp", target, {"start": "own"}, torch.arange(target.shape.vocab_size))
    draft = adopt(artifact, folder, tmp_path / "draft")
    assert (draft.info["method"], draft.info["imported_layout"]) == ("mtp", "own-mtp")
    as_it_is = guesses(open_draft(draft, target), target)
    assert torch.equal(as_it_is, guesses(own, target))

    with torch.no_grad():
        for weight in own.module.parameters():
            weight.mul_(1.0 + 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(4)))
    stitch(folder, tmp_path / "tuned", own.state_dict(), target.shape.num_layers)
    tuned = adopt(artifact, tmp_path / "tuned", tmp_path / "draft2")
    again = guesses(open_draft(tuned, target), target)
    assert torch.equal(again, guesses(own, target)) and not torch.equal(again, as_it_is)

    prefix, token_norm, _, projection, *_ = PARTS[layout]
    file = folder / "zz-mtp.safetensors"
    stored = load_file(file)
    turned = {**stored, f"{prefix}{projection}.weight": stored[f"{prefix}{projection}.weight"].T.contiguous()}
    missing = {name: tensor for name, tensor in stored.items() if name != f"{prefix}{token_norm}.weight"}
    for number, changed in enumerate((turned, missing)):
        other = tmp_path / f"other-{number}"
        other.mkdir()
        for one in folder.iterdir():
            (other / one.name).write_bytes(one.read_bytes())
        save_file(changed, other / file.name)
        with pytest.raises(UserError, match=r"module does not fit its config\.json") as error:
            adopt(artifact, other, tmp_path / f"refused-{number}")
        assert "\n" not in str(error.value)


def test_a_module_of_another_layout_is_refused_by_name(tmp_path: Path) -> None:
    folders = {layout: make_own_checkpoint(layout, tmp_path / layout) for layout in ("mimo", "deepseek")}
    artifact = load_target(model=str(folders["mimo"]), ctx=context(tmp_path / "target"))
    with pytest.raises(
        UserError, match="module is of layout deepseek, and the target's own checkpoint has one of layout"
    ):
        adopt(artifact, folders["deepseek"], tmp_path / "draft")


def test_a_module_that_speculators_took_out_of_a_model_is_that_module(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_own_checkpoint("qwen", tmp_path / "model")
    artifact = load_target(model=str(folder), ctx=context(tmp_path / "target"))
    target = open_target(artifact, dtype="float32", kernel="plain")
    own: Any = build_draft("mtp", target, {"start": "own"}, torch.arange(target.shape.vocab_size))
    names = {
        "token_norm.": "token_layernorm.",
        "hidden_norm.": "hidden_layernorm.",
        "projection.": "input_proj.",
        "last_norm.": "final_layernorm.",
        "block.": "",
    }
    stored = {}
    for name, tensor in own.module.state_dict().items():  # experts are one tensor there, too
        part = next(one for one in names if name.startswith(one))
        stored[f"mtp_layers.0.{names[part]}{name.removeprefix(part)}"] = tensor.clone()
    section = json.loads((folder / "config.json").read_text())
    method = {"proposal_type": "greedy", "speculative_tokens": 4}
    config = {
        "speculators_model_type": "mtp",
        "transformer_layer_config": section,
        "num_nextn_predict_layers": 1,
        "speculators_config": {"algorithm": "mtp", "proposal_methods": [method]},
    }
    there = tmp_path / "speculators"
    there.mkdir()
    save_file(stored, there / "model.safetensors")

    def adopted(out: str, **changed: Any) -> Any:
        (there / "config.json").write_text(json.dumps({**config, **changed}))
        return adopt(artifact, there, tmp_path / out)

    draft = adopted("draft")
    assert (draft.info["imported_layout"], draft.info["num_steps"]) == ("speculators-mtp", 4)
    assert torch.equal(guesses(open_draft(draft, target), target), guesses(own, target))
    for number, (changed, said) in enumerate(
        (
            ({"transformer_layer_config": {**section, "rms_norm_eps": 0.5}}, r"rms_norm_eps is 0\.5, the target's is"),
            ({"transformer_layer_config": {**section, "num_experts_per_tok": 1}}, "num_experts_per_tok is 1"),
            ({"transformer_layer_config": {"model_type": "nowhere"}}, "transformer_layer_config cannot be used"),
            ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, must be 1"),
        )
    ):
        with pytest.raises(UserError, match=said) as error:
            adopted(f"refused-{number}", **changed)
        assert "\n" not in str(error.value)
    save_file({n: t for n, t in stored.items() if "input_proj" not in n}, there / "model.safetensors")
    with pytest.raises(UserError, match=r"mtp_layers\.0\.input_proj\.weight is missing"):
        adopted("missing")
