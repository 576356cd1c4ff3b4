"""Resync: one obstacle is told and passed over, and everything behind it is made up for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.speedup.comparison.promotion_rule import judge
from flows.cli import main
from storage import record as keep
from storage.artifacts.store import RECORD_FILE, Store
from storage.history.query import query
from storage.history.write import rebuild
from storage.registry.aliases import aliases_of
from storage.registry.tracking import open_client


@pytest.fixture(autouse=True)
def obstacles(home: Path, make: Any, with_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that nobody knows yet, and before it two artifacts that cannot be read."""
    light_versions(monkeypatch)
    record = make("cut" * 8).path / RECORD_FILE
    record.write_text(record.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    make("old" * 8, files={"quality_flag.jsonl": '{"surplus": 1}\n'})
    release(make, "new" * 8)


def test_resync_tells_what_it_cannot_read_and_makes_up_for_all_else(home: Path) -> None:
    for _ in range(2):
        with pytest.raises(keep.ArtifactsSkipped) as told:
            keep.resync(home, judge)
        cut, other = told.value.lines
        assert cut.startswith("artifact cutcutcutcut: JSONDecodeError") and "\n" not in str(told.value)
        assert other.startswith("artifact oldoldoldold: ") and "unknown column surplus" in other
        assert aliases_of(open_client(home), NAME) == {"candidate": 1, "challenger": 1, "champion": 1}
        assert query("SELECT artifact_key FROM artifact", home)[1] == [("new" * 8,)]


def test_the_command_ends_with_1_and_says_which(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    assert main(["resync"]) == 1
    said = capsys.readouterr()
    cut, other, last = said.err.splitlines()
    assert "cutcutcutcut" in cut and "oldoldoldold" in other and last.startswith("2 artifacts cannot be read")
    assert not said.out
    assert aliases_of(open_client(home), NAME)["champion"] == 1


def test_a_rebuild_counts_what_it_cannot_read(home: Path) -> None:
    assert rebuild(home, Store(home)) == {"artifacts": 1, "runs": 0, "promotions": 0, "refused": 2}
