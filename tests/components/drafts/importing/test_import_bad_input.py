"""Checkpoints that must not be opened, or cannot be, are refused in one line before a weight is read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from foreign_drafts import VOCAB, Pair, change, context, make_pair
from safetensors.torch import load_file, save_file
from tiny_targets import save_with_words, tiny_llama

from components.contract import UserError
from components.drafts import import_draft
from components.drafts.importing import conventions
from components.drafts.importing.checkpoint import OWN_CONFIG_CLASSES, find_checkpoint
from components.targets import load_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def only_pickles(folder: Path) -> None:
    weights(folder).rename(folder / "pytorch_model.bin")


def a_pickle_in_disguise(folder: Path) -> None:
    weights(folder).write_bytes(b"PK\x03\x04" + bytes(100))


def cut_short(folder: Path) -> None:
    content = weights(folder).read_bytes()
    weights(folder).write_bytes(content[: len(content) // 2])


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def no_weights(folder: Path) -> None:
    weights(folder).unlink()


def not_a_number(folder: Path) -> None:
    change(folder, None, lambda tensors: tensors["fc.weight"][0, 0].fill_(float("nan")))


def twice(folder: Path) -> None:
    save_file({"norm.weight": torch.ones(32)}, folder / "more.safetensors")


def remote_code(folder: Path) -> None:
    change(folder, lambda config: config.update(auto_map={"AutoModel": "modeling_eagle.Eagle"}))
    (folder / "modeling_eagle.py").write_text("raise SystemExit('ran')\n")


def larger_than_the_disk(folder: Path) -> None:
    of_bytes(folder, 2 * shutil.disk_usage(folder).free)


def of_bytes(folder: Path, size: int) -> None:
    """A sparse file whose header is sound and whose one tensor has this size or a little more."""
    rows = size // (4 * 32) + 1
    entry = {"dtype": "F32", "shape": [rows, 32], "data_offsets": [0, rows * 32 * 4]}
    header = json.dumps({"midlayer.mlp.up_proj.weight": entry}).encode()
    with weights(folder).open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
    os.truncate(weights(folder), 8 + len(header) + rows * 32 * 4)


BAD: list[tuple[Callable[[Path], None], str]] = [
    (only_pickles, r"only pickled weights \(pytorch_model\.bin\), which run code when opened; convert"),
    (a_pickle_in_disguise, "a pickle under a safetensors name"),
    (cut_short, "cut short"),
    (no_config, "no config.json in it"),
    (no_json, "config.json: is not JSON"),
    (no_weights, "no weights"),
    (not_a_number, "fc.weight holds NaN or infinity"),
    (twice, r"norm\.weight is in model\.safetensors and in more\.safetensors|in more\.safetensors and in model"),
    (remote_code, "asks for code of its own"),
    (larger_than_the_disk, r"takes [\d.]+ GB as float32, and [\d.]+ GB are free"),
]


@pytest.mark.parametrize(("damage", "said"), BAD, ids=[damage.__name__ for damage, _ in BAD])
def test_bad_input_is_one_line(damage: Callable[[Path], None], said: str, pair: Pair, tmp_path: Path) -> None:
    folder = pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "out")
    damage(folder)
    with pytest.raises(UserError, match=said) as error:
        pair.adopt(folder, tmp_path / "draft")
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    assert not list((tmp_path / "draft").iterdir())


def test_weights_that_the_memory_cannot_hold_are_not_read(pair: Pair, tmp_path: Path) -> None:
    folder = pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "out")
    of_bytes(folder, 2 * psutil.virtual_memory().available)
    found = find_checkpoint(folder, "here")
    with pytest.raises(UserError, match=r"here: takes [\d.]+ GB as float32, and [\d.]+ GB of memory are free"):
        found.read(found.files)


def test_a_target_whose_tokenizer_has_more_tokens_than_its_embedding_is_refused_before_any_weight(
    pair: Pair, tmp_path: Path
) -> None:
    folder = pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "out")
    not_a_number(folder)  # what would be found as soon as weights are read
    words = [*(f"w{i}" for i in range(3, VOCAB + 1)), *conventions.PROMPTS[0].split()]
    save_with_words(tiny_llama(VOCAB, lambda name: 4.0, num_layers=8), tmp_path / "target", words)
    target = load_target(model=str(tmp_path / "target"), ctx=context(tmp_path / "artifact"))
    with pytest.raises(
        UserError, match=r"target: its tokenizer gives token 1\d\d, and config\.json knows 96 tokens"
    ) as error:
        import_draft(target, model=str(folder), method="eagle3", layout="auto", ctx=context(tmp_path / "draft"))
    assert "\n" not in str(error.value)


def test_no_such_folder_and_no_such_hub_id_are_one_line(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        pair.adopt(tmp_path / "nowhere", tmp_path / "draft")


def test_the_classes_that_speculators_names_in_auto_map_are_no_code_to_run(pair: Pair, tmp_path: Path) -> None:
    folder = pair.write("speculators", pair.network("eagle3", {}), {}, tmp_path / "out")
    change(folder, lambda config: config.update(auto_map={"": f"config.{OWN_CONFIG_CLASSES[0]}"}))
    assert find_checkpoint(folder, "here").config["auto_map"]
    assert pair.adopt(folder, tmp_path / "draft").info["method"] == "eagle3"


def test_shards_are_read_together_and_pickles_beside_them_are_left_alone(pair: Pair, tmp_path: Path) -> None:
    network = pair.network("eagle3", {})
    folder = pair.write("eagle3", network, {}, tmp_path / "out")
    tensors = load_file(weights(folder))
    weights(folder).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never opened")
    mine, theirs = pair.guesses(network), pair.guesses(pair.opens(pair.adopt(folder, tmp_path / "draft")))
    assert torch.equal(mine[0], theirs[0])
