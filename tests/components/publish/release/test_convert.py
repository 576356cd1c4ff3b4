"""A drafter that is converted to another format and back holds the same numbers; what cannot be is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from foreign_drafts import CUT, LLAMA3, OWN_BLOCK, Pair, make_pair
from safetensors.torch import load_file

from components.contract import UserError
from components.publish.release.convert import convert_folder
from flows.cli import main


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.set_num_threads(1)
    return make_pair(tmp_path_factory.mktemp("pair"))


def test_there_and_back_again(pair: Pair, tmp_path: Path) -> None:
    settings = {**OWN_BLOCK, "rope_scaling": LLAMA3, "norm_before_residual": True, "fc_norm": True, "window": 12}
    network = pair.network("eagle3", settings, CUT)
    first = pair.write("eagle3", network, settings, tmp_path / "first")
    target = str(pair.artifact.info["model"])
    lines = convert_folder(first, "speculators", target, tmp_path / "second")
    assert "eagle3 as speculators, from eagle3" in lines[0] and any("rope_theta is 500" in line for line in lines)
    convert_folder(tmp_path / "second", "eagle3", target, tmp_path / "third")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "third"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "third" / "config.json").read_text()


def test_half_precision_stays_half_precision(pair: Pair, tmp_path: Path) -> None:
    network = pair.network("medusa", {"num_heads": 2}, torch.arange(96))
    network = network.bfloat16()
    pair.write("medusa", network, {"num_heads": 2}, tmp_path / "first")
    lines = convert_folder(tmp_path / "first", "medusa", str(pair.artifact.info["model"]), tmp_path / "second")
    assert "bfloat16" in lines[0]
    (before,), (after,) = ([*(tmp_path / name).glob("*.safetensors")] for name in ("first", "second"))
    assert before.read_bytes() == after.read_bytes()


def test_what_cannot_be_converted_is_one_line(pair: Pair, tmp_path: Path) -> None:
    first, target = (
        pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "a"),
        str(pair.artifact.info["model"]),
    )
    with pytest.raises(UserError, match="is a drafter of method eagle3, which --to speculators, eagle3 can hold"):
        convert_folder(first, "medusa", target, tmp_path / "out")
    with pytest.raises(UserError, match="--to onnx: no such format"):
        convert_folder(first, "onnx", target, tmp_path / "out")
    with pytest.raises(UserError, match="is there already"):
        convert_folder(first, "speculators", target, first)
    with pytest.raises(UserError, match="--target nowhere: no such folder"):
        convert_folder(first, "speculators", "nowhere", tmp_path / "out")
    with pytest.raises(UserError, match="target_hidden_size is 32, the target's width is 192"):
        convert_folder(first, "speculators", "builtin", tmp_path / "out")


def test_the_command_writes_beside_the_folder(pair: Pair, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pair.write("eagle3", pair.network("eagle3", {}), {}, tmp_path / "mine")
    arguments = ["convert", str(tmp_path / "mine"), "--target", str(pair.artifact.info["model"]), "--to"]
    capfd.readouterr()
    assert main([*arguments, "speculators"]) == 0
    said = capfd.readouterr()
    assert "eagle3 as speculators" in said.out and not said.err
    assert (tmp_path / "mine-speculators" / "model.safetensors").is_file()
    assert main([*arguments, "onnx"]) == 2
    said = capfd.readouterr()
    assert not said.out and said.err.count("\n") == 1
