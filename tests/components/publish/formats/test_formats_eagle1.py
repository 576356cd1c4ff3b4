"""EAGLE-1 goes out with the scale of its embeddings multiplied in, which engines do not apply, and without a bias."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_formats import drafter_state

from components.drafts.interface import AbstractDraft
from components.publish.formats.interface import Source
from components.publish.formats.registry import (
    write_format,
)
from components.targets.interface import AbstractTarget

Networks = Callable[[str, dict[str, Any]], AbstractDraft]


def test_eagle1_goes_out_with_the_scale_of_its_embeddings_multiplied_in(
    networks: Networks, source: Source, opened: AbstractTarget, tmp_path: Path
) -> None:
    network: Any = networks("eagle1", {})
    assert abs(network.token_scale - 1) > 0.1, "nothing would be shown"
    write_format("eagle1", drafter_state(network, {}), source, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")["fc.weight"]
    token = opened.embedding[5].float()
    hidden = opened.shape.hidden_size
    theirs = stored[:, :hidden] @ token  # what an engine computes: no scale
    ours = network.fc.weight[:, :hidden] @ (token * network.token_scale)
    torch.testing.assert_close(theirs, ours)


def test_eagle1_without_a_bias_gets_one_of_zeros_and_says_none_in_its_config(
    networks: Networks, source: Source, tmp_path: Path
) -> None:
    write_format(
        "eagle1", drafter_state(networks("hass", {"fc_bias": False}), {"fc_bias": False}), source, tmp_path / "out"
    )
    assert not load_file(tmp_path / "out" / "model.safetensors")["fc.bias"].any()
    assert "bias" not in json.loads((tmp_path / "out" / "config.json").read_text())
