"""What a release holds comes back as the drafter that it was made of, and whatever comes back otherwise is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from own_checkpoints import make_own_checkpoint
from safetensors.torch import load_file, save_file
from saved_drafts import draw_wide, saved_draft

from components.contract import Context, Draft, Page, Release, Target, UserError
from components.drafts.storage.files import build_draft
from components.publish import reopen_release
from components.publish.formats.mtp import stitch
from components.publish.formats.registry import read_drafter_state
from components.targets import load_target
from components.targets.load import open_target


def context(folder: Path) -> Context:
    folder.mkdir(parents=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1)


def reopened(target: Target, release: Release, drafts: list[Draft], folder: Path) -> Page:
    return reopen_release(target, release, drafts, ctx=context(folder))


def test_every_format_comes_back_and_what_others_open_is_said(
    target: Target, drafts: dict[str, Draft], export: Callable[..., Release], tmp_path: Path
) -> None:
    release = export(include="all")
    made = reopened(target, release, list(drafts.values()), tmp_path / "sound")
    assert made.info["reopened"] == {"eagle3": "same", "mtp": "same"}
    assert '"mtp": "same"' in (made.path / "index.html").read_text(encoding="utf-8")
    record = json.loads((release.path / "release.json").read_text())
    record["formats"]["gguf"] = {**record["formats"]["eagle3"], "format": "gguf"}
    (release.path / "release.json").write_text(json.dumps(record))
    assert reopened(target, release, list(drafts.values()), tmp_path / "gguf").info["reopened"]["gguf"] == "unopened"


@pytest.mark.parametrize(("file", "name"), [("eagle3", "midlayer.hidden_norm.weight"), ("mtp", "")])
def test_a_drafter_that_comes_back_otherwise_is_found(
    file: str, name: str, target: Target, drafts: dict[str, Draft], export: Callable[..., Release], tmp_path: Path
) -> None:
    release = export(include="all")
    weights = release.path / file / "model.safetensors"
    tensors = load_file(weights)
    name = name or next(one for one in tensors if one.endswith("hnorm.weight"))
    tensors[name] *= -1.0
    save_file(tensors, weights)
    with pytest.raises(UserError, match=f"{file}: drafts otherwise after it went through {file}"):
        reopened(target, release, list(drafts.values()), tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_in_a_copy_of_its_target_comes_back_as_that_copy_rounds_it(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_own_checkpoint("deepseek", tmp_path / "model")
    own = folder / "zz-mtp.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(own).items()}, own, metadata={"format": "pt"})
    target = load_target(model=str(folder), ctx=context(tmp_path / "target"))
    opened, settings = open_target(target, kernel="plain", dtype="float32"), {"start": "own", "recursive_steps": 2}
    network = build_draft("mtp", opened, settings, torch.arange(opened.shape.vocab_size))
    draw_wide(network)
    draft = saved_draft(tmp_path / "draft", network, settings, opened, target_key=target.key)
    out, tensors = tmp_path / "release", read_drafter_state(draft.path).tensors
    counts: dict[str, Any] = {**stitch(folder, out / "stitched", tensors, opened.shape.num_layers)}
    written = {"stitched": {**counts, "draft_key": draft.key, "method": "mtp", "format": "stitched"}}
    (out / "release.json").write_text(json.dumps({"formats": written}))
    release = Release("r", out)
    assert reopened(target, release, [draft], tmp_path / "sound").info["reopened"] == {"stitched": "same"}
    stored = load_file(out / "stitched" / own.name)
    changed = {name: -tensor if name.endswith("eh_proj.weight") else tensor for name, tensor in stored.items()}
    save_file(changed, out / "stitched" / own.name, metadata={"format": "pt"})
    with pytest.raises(UserError, match="mtp: drafts otherwise after it went through stitched"):
        reopened(target, release, [draft], tmp_path / "torn")
