"""Transformers runs what our own forward pass does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.targets.load import open_target


@pytest.fixture
def copied(tmp_path: Path, tiny_targets: dict[str, Path]) -> Path:
    return Path(shutil.copytree(tiny_targets["qwen3"], tmp_path / "model"))


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def test_yarn_falls_back_to_transformers(copied: Path) -> None:
    changed_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})(copied)
    assert open_target(copied, kernel="plain").kernel == "transformers"
