"""Medusa's heads go out one LM head each over the whole vocabulary, also where all are tied to the target's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tiny_formats import VOCAB, drafter_state

from components.publish.formats.interface import Source
from components.publish.formats.registry import write_format


def test_tied_heads_are_rows_of_the_targets_head(
    networks: Callable[[str, dict[str, Any]], Any], source: Source, tmp_path: Path
) -> None:
    settings = {"num_heads": 2, "head": "tied"}
    write_format("medusa", drafter_state(networks("medusa", settings), settings), source, tmp_path)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    drafted = torch.arange(3, VOCAB, 2)
    for head in range(2):
        assert tensors[f"{head}.1.weight"].shape == (VOCAB, 32)
        assert torch.equal(tensors[f"{head}.1.weight"][drafted], source.head().float()[drafted])
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"], config["medusa_fc_bias"]) == (2, 1, True)
