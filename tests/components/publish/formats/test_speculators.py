"""The layout of speculators states what its readers would otherwise guess: the taps, every norm, the mask token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_formats import SETTINGS, drafter_state

from components.contract import UserError
from components.publish.formats.interface import Source
from components.publish.formats.registry import layout_of, write_format

Networks = Callable[[str, dict[str, Any]], Any]


def test_the_mask_of_p_eagle_is_the_row_of_a_token_that_no_drafter_reads(
    networks: Networks, source: Source, tmp_path: Path
) -> None:
    network = networks("p-eagle", SETTINGS["p-eagle"])
    write_format("speculators", drafter_state(network, SETTINGS["p-eagle"]), source, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mask_token_id"] == source.shape.pad_token_id == 2
    embedding = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(embedding[2], network.mask_token)
    others = torch.arange(len(embedding)) != 2
    assert torch.equal(embedding[others], source.embedding().float()[others])


def test_a_target_without_a_spare_token_has_no_place_for_the_mask(networks: Networks, source: Source) -> None:
    drafter = drafter_state(networks("p-eagle", SETTINGS["p-eagle"]), SETTINGS["p-eagle"])
    bare = replace(source, shape=replace(source.shape, pad_token_id=None, bos_token_id=None))
    with pytest.raises(UserError, match="needs a token of its own"):
        layout_of("speculators").lay_out(drafter, bare)


def test_every_flag_and_tap_is_written_and_a_local_target_is_not_named(networks: Networks, source: Source) -> None:
    config = layout_of("speculators").lay_out(drafter_state(networks("eagle3", {}), {}), source).config
    assert [config[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [
        False
    ] * 4
    assert config["eagle_aux_hidden_state_layer_ids"] == list(source.shape.tap_layers)
    assert config["speculators_config"]["verifier"]["name_or_path"] is None
