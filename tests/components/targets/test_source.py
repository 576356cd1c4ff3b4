"""Where the files of a target are, and that a changed one is noticed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from changed_folders import context
from safetensors.torch import load_file, save_file
from tiny_targets import make_tiny_target

from components.contract import UserError
from components.targets import load_target
from components.targets.load import open_target, open_tokenizer
from components.targets.source import load_target_fingerprint, model_name, open_record


@pytest.mark.parametrize("model", ["./no/such/folder", "nowhere", "/no/such/folder"])
def test_a_wrong_path_is_not_looked_up_on_the_hub(model: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_target(model=model, ctx=context(tmp_path))


def test_a_hub_id_without_a_network_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UserError) as refused:
        load_target(model="nobody/nothing", ctx=context(tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert "nobody/nothing" in str(refused.value)


def test_a_download_that_the_disk_cannot_hold_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub's client raises when 30 GB meet a full disk; a model in a folder is not copied."""

    def no_room(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "model-00001-of-00007.safetensors"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_room)
    with pytest.raises(UserError, match=r"nobody/nothing: .*No space left on device") as refused:
        load_target(model="nobody/nothing", ctx=context(tmp_path / "out"))
    assert "\n" not in str(refused.value)


def test_a_model_is_named_without_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    given = ["builtin", "owner/name@main", str(tmp_path / "models" / "mine"), "models/mine", "./gone/away", ""]
    assert [model_name(model) for model in given] == ["builtin", "owner/name@main", "mine", "mine", "away", ""]


def test_a_file_changed_after_loading_is_noticed(copied: Path, tmp_path: Path) -> None:
    target = load_target(model=str(copied), ctx=context(tmp_path / "out"))
    weights = load_file(copied / "model.safetensors")
    save_file({name: weight + 1 for name, weight in weights.items()}, copied / "model.safetensors")
    with pytest.raises(UserError, match="changed since"):
        open_target(target)
    (copied / "model.safetensors").unlink()
    with pytest.raises(UserError, match="gone since"):
        open_tokenizer(target)


def test_a_release_finds_the_target_that_a_step_made_in_its_own_home(tmp_path: Path) -> None:
    """A copied home reads nothing from the original, which may be gone; models in MLflow lie deeper below it."""
    home, copy = tmp_path / "home", tmp_path / "copy"
    made = make_tiny_target("qwen3", home / "store" / "k1")
    record = {"model": str(made), "folder": str(made), "trust_remote_code": False, "dtype": None, "files": {}}
    for place in ("store/k2/draftsmith", "mlflow/artifacts/releases/models/m-1/artifacts/release/draftsmith"):
        (home / place).mkdir(parents=True)
        (home / place / "target.json").write_text(json.dumps(record))
    shutil.copytree(home, copy)
    for place in (copy / "store/k2/draftsmith", next((copy / "mlflow").rglob("draftsmith"))):
        assert open_record(place)[0] == copy / "store" / "k1"
    assert open_record(home / "store/k2/draftsmith")[0] == made


def test_the_key_follows_the_weights_not_the_place_or_the_time(copied: Path, tmp_path: Path) -> None:
    before = load_target_fingerprint({"model": str(copied)})
    (copied / "README.md").write_text("notes")  # not part of the model
    (copied / "model.safetensors").touch()
    moved = copied.rename(tmp_path / "moved")
    assert load_target_fingerprint({"model": str(moved)}) == before
    make_tiny_target("qwen3", moved, seed=1)
    after = load_target_fingerprint({"model": str(moved)})
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}
