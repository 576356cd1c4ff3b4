"""Which checkpoints our own forward pass runs: those whose tensors it knows, each and all.

A mixture gives each row what its own experts give, weighed by the router, at every number of rows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from changed_folders import changed_config, without_tensor

from components.contract import UserError
from components.targets.forward import llama
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


@pytest.mark.parametrize("is_large", [False, True])
def test_experts_of_a_large_mixture_are_held_once(
    is_large: bool, tiny_targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(llama, "LAID_OUT", 0)
    folder, ids = tiny_targets["mixtral"], torch.arange(1, 9)[None]
    one, plain = (open_target(folder, kernel=kernel, dtype="float32") for kernel in ("transposed", "plain"))
    assert isinstance(one, llama.FastTarget)
    kernels = {linear.kernels for layer in one._layers for linear in layer.mlp.linears()}
    assert kernels == {("plain",) if is_large else ("transposed",)}
    logits, expected = (target.forward(ids, target.new_cache(1, 8)).logits for target in (one, plain))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
