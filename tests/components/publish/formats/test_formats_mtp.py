"""A new MTP module in MiMo's shape has the sizes that vLLM takes from its target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_formats import drafter_state

from components.contract import UserError
from components.publish.formats.interface import Source
from components.publish.formats.registry import layout_of, write_format

Networks = Callable[[str, dict[str, Any]], Any]


@pytest.mark.parametrize(("name", "value"), [("intermediate_size", 64), ("rms_norm_eps", 1e-5)])
def test_vllm_builds_a_new_module_by_the_targets_config(
    name: str, value: float, networks: Networks, source: Source, tmp_path: Path
) -> None:
    settings = {"mtp_modules": 1}
    write_format("mimo", drafter_state(networks("mtp", settings), settings), source, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    with pytest.raises(UserError, match=f"{name} is {value}, must be the target's"):
        layout_of("mimo").check_target({**config, name: value}, source.shape, "draft")
