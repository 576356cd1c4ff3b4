"""Targets of every way of quantising that loads here: features, answers and training, beside their loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forked import recorded
from quantised_folders import QUANTISED, held_against_loader

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3 * 3600)]


def every_way(folder: Path) -> dict[str, Any]:
    """What held_against_loader finds of each way whose packages are installed; the others' names."""
    found: dict[str, Any] = {}
    missing: list[str] = []
    for number, case in enumerate(QUANTISED):
        name = f"{case.method}: {case.way}"
        try:
            found[name] = held_against_loader(case, folder / str(number))
        except pytest.skip.Exception:
            missing.append(name)
    return {"ways": found, "not_installed": missing}


def test_every_quantised_target_is_as_its_loader_gives_it(tmp_path: Path) -> None:
    found = recorded("quantised-targets", lambda: every_way(tmp_path))
    assert [name for name, way in found["ways"].items() if way["faults"]] == []
    assert all(way["features_apart"] == way["logits_apart"] == 0 for way in found["ways"].values())
