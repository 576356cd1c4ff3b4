"""The fields of a Llama block are checked each and together, whatever a stranger wrote there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_formats import drafter_state

from components.contract import UserError
from components.publish.formats.interface import Source
from components.publish.formats.registry import write_format
from components.publish.release.validate import validate_folder

Networks = Callable[[str, dict[str, Any]], Any]


@pytest.fixture
def eagle3(networks: Networks, source: Source, tmp_path: Path) -> Path:
    write_format("eagle3", drafter_state(networks("eagle3", {}), {}), source, tmp_path / "draft")
    return tmp_path / "draft"


@pytest.mark.parametrize("value", [10**9, 10**400, -(10**400)], ids=["large", "huge", "negative"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "rms_norm_eps"])
def test_a_number_that_no_engine_can_hold_is_one_line_at_once(eagle3: Path, name: str, value: int) -> None:
    config = json.loads((eagle3 / "config.json").read_text())
    (eagle3 / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(UserError, match=f"{name} is "):
        validate_folder(eagle3)
