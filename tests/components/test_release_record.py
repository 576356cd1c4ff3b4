"""The records of a release are read as they were written, in the same order, and a folder without one is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.contract import UserError
from components.release_record import RELEASE, ServeRecord, read_release, read_serve, write_json

SERVED: ServeRecord = {
    "method": "eagle3",
    "draft_key": "d",
    "target_key": "t",
    "depth_k": 3,
    "depth_by_workload": {"all": 3, "code": 0},
    "verdict": "use",
}


def test_what_is_served_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "draftsmith").mkdir()
    write_json(tmp_path / "draftsmith" / "serve.json", SERVED)
    assert read_serve(tmp_path) == SERVED
    text = (tmp_path / "draftsmith" / "serve.json").read_text()
    assert text == json.dumps(SERVED, indent=1) + "\n"


def test_a_folder_that_is_no_release_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no serve\.json; the artifact `release` must be"):
        read_serve(tmp_path)
    with pytest.raises(UserError, match=RELEASE):
        read_release(tmp_path)
