"""A draft model goes out as an ordinary Llama with its target's tokenizer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_formats import drafter_state

from components.contract import UserError
from components.drafts.interface import AbstractDraft
from components.publish.formats.interface import Source
from components.publish.formats.registry import (
    write_format,
)
from components.publish.release.validate import validate_folder

Networks = Callable[[str, dict[str, Any]], AbstractDraft]


def test_a_draft_model_brings_the_tokenizer_of_its_target(networks: Networks, source: Source, tmp_path: Path) -> None:
    write_format(
        "causal-lm", drafter_state(networks("draft-model", {"num_layers": 1}), {"num_layers": 1}), source, tmp_path
    )
    assert source.folder is not None
    assert (tmp_path / "tokenizer.json").read_bytes() == (source.folder / "tokenizer.json").read_bytes()


def test_a_causal_lm_of_another_architecture_is_no_draft_model(source: Source, tmp_path: Path) -> None:
    assert source.folder is not None
    folder = tmp_path / "other"
    folder.mkdir()
    shutil.copyfile(source.folder / "model.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UserError, match="architectures is"):
        validate_folder(folder)


def test_a_tokenizer_goes_out_without_the_place_it_was_loaded_from(
    networks: Any, source: Source, tmp_path: Path
) -> None:
    """Older checkpoints bring `name_or_path` along, often a folder of the cluster that they were trained on."""
    assert source.folder is not None
    folder = tmp_path / "secret-llm"
    shutil.copytree(source.folder, folder)
    file = folder / "tokenizer_config.json"
    before = json.loads(file.read_text())
    file.write_text(json.dumps({**before, "name_or_path": "/cluster/secret-llm", "tokenizer_file": "/x/t.json"}))
    network = networks("draft-model", {"num_layers": 1})
    own = drafter_state(network, {"num_layers": 1})
    write_format("causal-lm", own, dataclasses.replace(source, folder=folder), tmp_path / "out")
    assert json.loads((tmp_path / "out" / file.name).read_text()) == before
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not any("secret" in one.read_text(errors="replace") for one in (tmp_path / "out").iterdir())
