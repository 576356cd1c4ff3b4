"""A release says where it comes from: keys, sources with counts, versions, checksums that sha256sum itself accepts."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_lineage import KEYS, put, put_training_data

from components.contract import Draft, Target, UserError
from components.source_code import code_state


@pytest.fixture
def recorded(export: Callable[..., Any], target: Target, drafts: dict[str, Draft], tmp_path: Path) -> Any:
    """Exports a release whose drafter lies in a store with its whole lineage."""

    def run(**settings: Any) -> Any:
        store = tmp_path / "store"
        features = put_training_data(store, target.key)
        inputs = {"target": target.key, "features": features}
        eagle3 = drafts["eagle3"]
        put(store, eagle3.key, "Draft", "drafts.train_draft", dict(eagle3.info), inputs=inputs)
        put(store, target.key, "Target", "targets.load_target", dict(target.info), settings={"model": "/models/x-7b"})
        for file in eagle3.path.iterdir():
            shutil.copyfile(file, store / eagle3.key / file.name)
        here = dataclasses.replace(eagle3, path=store / eagle3.key)
        return export(only=[here, drafts["mtp"]], **settings)

    return run


def provenance_of(release: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((release / "provenance.json").read_text())
    return found


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda found: found["metadata"]["component"].update({"bom-ref": "0" * 64}), "of another release"),
        (lambda found: found["components"].pop(0), "says nothing of"),
        (lambda found: found["components"].append(found["components"][0]), "twice"),
        (lambda found: found.update(specVersion="9"), "must be CycloneDX 1.6"),
        (lambda found: found.pop("dependencies"), "not the provenance of a release"),
    ],
)
def test_a_provenance_that_is_not_the_releases_is_found(
    spoil: Callable[[dict[str, Any]], Any], said: str, export: Callable[..., Any]
) -> None:
    from components.publish.card.provenance import check_provenance

    release = export().path
    record, found = json.loads((release / "release.json").read_text()), provenance_of(release)
    assert check_provenance(found, record, "release")[1] >= 4
    spoil(found)
    with pytest.raises(UserError, match=said):
        check_provenance(found, record, "release")


def test_every_artifact_of_the_lineage_is_named_with_what_it_was_made_from(
    recorded: Callable[..., Any], drafts: dict[str, Draft], target: Target
) -> None:
    release = recorded()
    found = provenance_of(release.path)
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    named = {one["bom-ref"]: one for one in found["components"]}
    assert set(KEYS.values()) | {drafts["eagle3"].key, target.key} <= set(named)
    depends = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    assert depends[KEYS["clean"]] == [KEYS["chats"], KEYS["test"]]
    assert drafts["eagle3"].key in depends[release.key]
    chats = named[KEYS["chats"]]
    assert [source["name"] for source in chats["data"]] == ["english", "chinese"]
    told = {one["name"]: one["value"] for one in chats["data"][0]["contents"]["properties"]}
    assert told == {"draftsmith:rows read": "900", "draftsmith:rows kept": "850", "draftsmith:licence": "Apache-2.0"}
    files = {one["name"]: one["hashes"][0]["content"] for one in named[target.key]["components"]}
    stated = json.loads((release.path / "draftsmith" / "target.json").read_text())["files"]
    assert files == {name: facts["sha256"] for name, facts in stated.items()}
    assert named["torch@2.13.0"]["properties"][0]["value"].startswith("Chats"), "as recorded when it was made"
    assert not any(ref.startswith(("prefect@", "mlflow@")) for ref in named), "they touch no weights"
    tool = found["metadata"]["tools"]["components"][0]
    if (state := code_state()).commit:
        assert tool["pedigree"]["commits"] == [{"uid": state.commit}]


def test_what_no_record_tells_is_said_to_be_unknown(export: Callable[..., Any]) -> None:
    release = export()
    found = provenance_of(release.path)
    unknown = [one for one in found["compositions"] if one["aggregate"] == "incomplete"]
    assert len(unknown) == 1 and len(unknown[0]["assemblies"]) == 6
    assert "not recorded" in (release.path / "README.md").read_text()


def test_it_tells_no_folder_no_host_and_no_time_and_is_the_same_twice(
    recorded: Callable[..., Any], tmp_path: Path
) -> None:
    first = recorded().path
    again = first.rename(tmp_path / "first")
    second = recorded().path
    for name in ("provenance.json", "README.md", "SHA256SUMS", "release.json"):
        assert (again / name).read_bytes() == (second / name).read_bytes(), name
    text = (second / "provenance.json").read_text()
    assert "secret-project" not in text and "/models" not in text and str(tmp_path) not in text
    assert "Linux on a host" not in text and not re.search(r"20\d\d-\d\d-\d\d", text)


def test_the_card_tells_sources_and_what_was_kept_out_by_count(recorded: Callable[..., Any]) -> None:
    card = (recorded().path / "README.md").read_text()
    assert "256 answers (12750 answer tokens of 22048, validation included), which the target wrote itself" in card
    assert "| english | Apache-2.0 | 900 | 850 |" in card and "| chinese | not stated | 800 | 790 |" in card
    assert "133 that held a benchmark's prompt or reference answer" in card and "264 benchmark texts" in card
    assert "not stated for chinese" in card
    assert "source file" not in card, "these prompts are not split by source file"
