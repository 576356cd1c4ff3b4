"""The lineage of an artifact is everything that it was made from, each once, and a lost record is known by its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.contract import Draft
from components.publish.card.lineage import Lineage, ancestors, lineage_of

INPUTS: dict[str, dict[str, object]] = {
    "draft": {"target": "target", "features": ["features"]},
    "features": {"target": "target", "prompts": ["train", "lost"]},
    "train": {},
    "target": {},
}


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    for key, inputs in INPUTS.items():
        (tmp_path / key).mkdir()
        record = {"inputs": inputs, "uses": f"room.make_{key}", "git_commit": None}
        content = {"kind": "Draft", "info": {"name": key}, "record": record}
        (tmp_path / key / "artifact.json").write_text(json.dumps(content))
    return lineage_of([Draft(key="draft", path=tmp_path / "draft")])


def test_each_artifact_stands_once_and_sources_last(lineage: Lineage) -> None:
    assert list(lineage) == ["draft", "target", "features", "train", "lost"]
    assert lineage["features"].inputs == {"target": ("target",), "prompts": ("train", "lost")}
    assert lineage["train"].uses == "room.make_train" and lineage["train"].info == {"name": "train"}


def test_an_artifact_without_a_record_is_known_by_its_key_alone(lineage: Lineage) -> None:
    assert not lineage["lost"].has_record and lineage["lost"].uses == "" and lineage["lost"].inputs == {}


def test_ancestors_do_not_follow_inputs_that_are_left_out(lineage: Lineage) -> None:
    assert [one.key for one in ancestors(lineage, "draft")] == ["draft", "target", "features", "train", "lost"]
    assert [one.key for one in ancestors(lineage, "draft", without=("features",))] == ["draft", "target"]
    assert ancestors(lineage, "unknown") == []
