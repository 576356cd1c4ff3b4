"""A drafter on disk opens as the drafter that was saved, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_drafts import saved_draft
from tiny_drafts import TRAINED, new_draft

from components.contract import Draft, UserError
from components.drafts.storage.files import method_class, open_draft
from components.methods import METHODS
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]


def saved(directory: Path, target: AbstractTarget, method: str) -> Draft:
    return saved_draft(directory, new_draft(target, method), {}, target)


@pytest.mark.parametrize("method", TRAINED)
@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape", "d2t", "no d2t"])
def test_a_damaged_drafter_is_refused(method: str, damage: str, tmp_path: Path, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = saved(tmp_path, target, method)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    if damage == "missing":
        del tensors[name]
    elif damage == "unexpected":
        tensors["model.embed_tokens.weight"] = torch.zeros(2, 2)
    elif damage == "shape":
        tensors[name] = tensors[name][:, 1:].contiguous()
    elif damage == "d2t":
        tensors["d2t"][-1] = 10_000
    else:
        del tensors["d2t"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_draft(draft, target)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path, tiny_target: MakeTarget) -> None:
    draft = saved(tmp_path, tiny_target("llama"), "eagle3")
    record = json.loads((tmp_path / "draft.json").read_text())
    record["target"]["hidden_size"] = 4096
    (tmp_path / "draft.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="hidden_size 4096"):
        open_draft(draft, tiny_target("llama"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "\ud800"}, "is unknown"),
        ({"method": None}, "not a name"),
        ({"settings": "x"}, "not a table"),
        ({"settings": {"ttt_steps": "many"}}, "does not take its settings"),
        ({"settings": {"intermediate_size": 2**50}}, "cannot be built"),
        ({"target": [1]}, "does not say the target's hidden_size"),
        ({"target": {"vocab_size": 384}}, "hidden_size"),
        ({"storage": {"weights": "int3", "group_size": 0, "keep": []}}, "storage"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(
    change: dict[str, object], said: str, tmp_path: Path, tiny_target: MakeTarget
) -> None:
    draft = saved(tmp_path, tiny_target("llama"), "eagle3")
    file = tmp_path / "draft.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=said) as refused:
        open_draft(draft, tiny_target("llama"))
    assert str(file) in str(refused.value) and len(str(refused.value)) < 500


def test_an_empty_folder_is_refused(tmp_path: Path, tiny_target: MakeTarget) -> None:
    with pytest.raises(UserError, match=r"draft\.json"):
        open_draft(Draft(key="d", path=tmp_path), tiny_target("llama"))


def test_every_method_can_be_named_and_no_other() -> None:
    assert [method_class(name).method for name in METHODS] == list(METHODS)
    with pytest.raises(UserError, match="known are " + ", ".join(sorted(METHODS))):
        method_class("eagle4")
