"""Transformers runs what our own forward pass does not."""

from __future__ import annotations

from pathlib import Path

from changed_folders import changed_config

from components.targets.load import open_target


def test_yarn_falls_back_to_transformers(copied: Path) -> None:
    changed_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})(copied)
    assert open_target(copied, kernel="plain").kernel == "transformers"
