"""Which checkpoints our own forward pass runs: those whose tensors it knows, each and all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from changed_folders import changed_config, without_tensor

from components.contract import UserError
from components.targets.load import open_target


def test_a_bias_that_its_neighbours_have_is_missed(tmp_path: Path, tiny_targets: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(tiny_targets["llama"], tmp_path / "model"))
    without_tensor("model.layers.1.self_attn.v_proj.bias")(folder)
    with pytest.raises(UserError, match=r"lack 1 of the tensors .* model\.layers\.1\.self_attn\.v_proj\.bias"):
        open_target(folder, kernel="plain")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_tied_checkpoint_without_a_head_lacks_nothing(
    family: str, tmp_path: Path, tiny_targets: dict[str, Path]
) -> None:
    folder = Path(shutil.copytree(tiny_targets[family], tmp_path / "model"))
    without_tensor("lm_head.weight")(folder)
    changed_config(tie_word_embeddings=True)(folder)
    opened = open_target(folder, kernel="transformers")
    torch.testing.assert_close(opened.unembed(torch.eye(64)).T, opened.embedding)
