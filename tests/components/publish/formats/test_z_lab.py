"""z-lab's layout holds what its readers take: blocks of their convention over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_formats import SETTINGS, drafter_state

from components.contract import UserError
from components.drafts.importing.checkpoint import find_checkpoint
from components.drafts.importing.imported_draft import read_drafter, reader_of
from components.publish.formats.interface import Source
from components.publish.formats.registry import write_format
from components.targets.interface import AbstractTarget


def test_what_its_readers_would_draft_otherwise_is_refused_with_the_setting_to_change(
    networks: Callable[..., Any], source: Source, tmp_path: Path
) -> None:
    told = SETTINGS["dflash"]
    with pytest.raises(UserError, match=r"drafter from 47 of 96 tokens: say draft_vocab_size: 96"):
        write_format("z-lab", drafter_state(networks("dflash", told), told), source, tmp_path / "cut")
    for method, anchor in (("dflash", True), ("dspark", False)):
        told = SETTINGS[method] | {"sample_from_anchor": anchor, "window": 0}
        with pytest.raises(UserError, match=f"say sample_from_anchor: {str(not anchor).lower()}"):
            write_format("z-lab", drafter_state(networks(method, told, "z-lab"), told), source, tmp_path / method)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_reader_of_public_checkpoints_finds_the_drafter_that_went_out(
    method: str, networks: Callable[..., Any], source: Source, opened: AbstractTarget, tmp_path: Path
) -> None:
    """It was written for what z-lab's and DeepSpec's own code saves (test_import_dflash.py)."""
    told = SETTINGS[method] | {"window": 0}
    network = networks(method, told, "z-lab")
    write_format("z-lab", drafter_state(network, told), source, tmp_path / "out")
    found = find_checkpoint(tmp_path / "out", "out")
    imported = read_drafter(found, reader_of(found, "auto"), opened)
    assert (imported.method, imported.tap_layers, imported.draft_ids) == (method, opened.shape.tap_layers, None)
    read = network.settings.model_copy(update=imported.settings)
    assert read.model_dump() == network.settings.model_dump() | {"mask_token_id": 95, "intermediate_size": 48}
    ours = network.state_dict()
    assert imported.tensors.keys() == ours.keys() and all(torch.equal(imported.tensors[n], ours[n]) for n in ours)
