"""A checkpoint's MTP module is found and fits, or is refused in one line; its names come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from own_checkpoints import LAYOUTS, make_own_checkpoint, own_tensors
from safetensors.torch import load_file, save_file

from components.contract import UserError
from components.drafts.methods.mtp import Mtp
from components.drafts.methods.mtp_native import MtpNative
from components.drafts.methods.mtp_native_weights import find_native_mtp
from components.drafts.settings import MtpSettings
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

OWN = MtpSettings(start="own")


def test_a_checkpoint_without_a_module_is_refused_in_one_line(tiny_target: Callable[[str], AbstractTarget]) -> None:
    with pytest.raises(UserError, match=r"has no MTP module .*; train a new one with start: new") as caught:
        Mtp.build(tiny_target("llama"), OWN, torch.arange(8))
    assert "\n" not in str(caught.value)


def test_a_module_that_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = make_own_checkpoint("mimo", tmp_path / "mimo")
    tensors = load_file(folder / "zz-mtp.safetensors")
    tensors["model.mtp_layers.0.mlp.down_proj.weight"] = torch.zeros(64, 5)
    del tensors["model.mtp_layers.0.final_layernorm.weight"]
    save_file(tensors, folder / "zz-mtp.safetensors")
    with pytest.raises(UserError, match=r"down_proj\.weight is \[64, 5\], must be \[64, 128\] and 1 more") as caught:
        Mtp.build(open_target(folder, dtype="float32", kernel="plain"), OWN, torch.arange(8))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_and_values_come_back_as_they_were_stored(layout: str, tmp_path: Path) -> None:
    folder = make_own_checkpoint(layout, tmp_path / layout)
    target, stored = open_target(folder, dtype="float32", kernel="plain"), own_tensors(layout, folder)
    draft = Mtp.build(target, OWN, torch.arange(8))
    assert isinstance(draft, MtpNative)
    weights = find_native_mtp(folder, target.shape.num_layers, layout)
    again = weights.to_checkpoint_names(weights.read(draft.module.state_dict(), layout))
    assert {name for name in stored if "embed_tokens" not in name} == again.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in again.items())
