"""Machines that share a secret take nothing from the shared store that was written by somebody without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.rows import QualityFlag, write_rows
from storage.artifacts import remote as remote_store
from storage.artifacts import sync as sharing
from storage.artifacts.records import SECRET_VARIABLE, digest_of, with_digest
from storage.artifacts.remote import VARIABLE, drain_problems
from storage.artifacts.store import Store
from storage.history import query as results
from storage.history.records import new_promotion
from storage.journal import Journal, all_runs, log_promotion, promotions

KEY = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shared store whose machines know a secret."""
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    monkeypatch.setenv(SECRET_VARIABLE, "one secret of the team")
    monkeypatch.setattr(sharing, "CATCH_UP_EVERY_S", 0.0)
    remote_store._store_at.cache_clear()
    yield tmp_path / "team"
    remote_store._store_at.cache_clear()


def make(home: Path, value: float = 1.0) -> Path:
    """An artifact with one measured row, in this home and in the shared store."""
    store = Store(home)
    with store.lock(KEY):
        out, _ = store.open_staging(KEY)
        write_rows(out, [QualityFlag("s", KEY, "mtp", "code", "info", value, "")])
        return store.commit(KEY, "Measurements", {"value": value}, {"pipeline": "p", "step": "s", "seconds": 1.0}).path


def another_machine(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    remote_store._store_at.cache_clear()
    drain_problems()


def test_who_knows_the_secret_reuses_what_others_made(tmp_path: Path, team: Path) -> None:
    make(tmp_path / "ada")
    found = Store(tmp_path / "bob").get(KEY)
    assert found is not None and found.info == {"value": 1.0}
    assert "secret of the team" not in "".join(path.read_text(errors="replace") for path in team.rglob("*.json"))


@pytest.mark.parametrize("secret", ["another secret", "one secret of the tea", ""])
def test_a_record_without_the_seal_is_not_used_and_stays_where_it_is(
    tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    another_machine(monkeypatch, secret)
    make(tmp_path / "eve", 9.0)
    another_machine(monkeypatch, "one secret of the team")
    store = Store(tmp_path / "bob")
    assert store.get(KEY) is None and store.probe(KEY).artifact is None and store.get(KEY) is None
    (said,) = drain_problems()
    assert KEY[:12] in said and SECRET_VARIABLE in said and "\n" not in said
    assert (team / "artifacts" / f"{KEY}.json").is_file(), "it may be somebody's whose secret we lack"


@pytest.mark.parametrize("part", ["info", "record", "files", "session", "finished_at", "kind", "key"])
def test_no_part_of_a_sealed_record_can_be_changed(tmp_path: Path, team: Path, part: str) -> None:
    """Not even with the right digest of what it says now."""
    make(tmp_path / "ada")
    file = team / "artifacts" / f"{KEY}.json"
    content = json.loads(file.read_text())
    content[part] = {"info": {"value": 2.0}, "record": {}, "files": {}, "finished_at": 1.0}.get(part, "Draft")
    file.write_text(json.dumps({**with_digest(content), "seal": content["seal"]}))
    assert Store(tmp_path / "bob").get(KEY) is None
    assert len(drain_problems()) == 1


def test_our_own_making_takes_the_place_of_an_unsealed_one_and_keeps_it(
    tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    another_machine(monkeypatch, "another secret")
    make(tmp_path / "eve", 9.0)
    another_machine(monkeypatch, "one secret of the team")
    make(tmp_path / "ada", 1.0)
    found = Store(tmp_path / "bob").get(KEY)
    assert found is not None and found.info == {"value": 1.0}
    (earlier,) = (team / "earlier").iterdir()
    assert json.loads(earlier.read_text())["info"] == {"value": 9.0}
    assert results.query("SELECT value FROM quality_flag", tmp_path / "carl")[1] == [(1.0,)]


def test_without_a_secret_everybody_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "ada")
    another_machine(monkeypatch, "")
    assert Store(tmp_path / "bob").get(KEY) is not None and drain_problems() == []


def test_runs_and_promotions_of_others_count_only_with_their_seals(
    tmp_path: Path, team: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(home: Path, pipeline: str, version: int) -> str:
        journal = Journal.start(home, pipeline, {}, "direct")
        journal.add("end", status="completed", reason="")
        journal.close()
        log_promotion(home, new_promotion("m", "champion", "promote", None, version, "x", "why", {}))
        sharing.send(home)
        return str(journal.entries[0]["run_id"])

    ours = tell(tmp_path / "ada", "ours", 1)
    another_machine(monkeypatch, "another secret")
    tell(tmp_path / "eve", "forged", 2)
    another_machine(monkeypatch, "")
    nobody = tell(tmp_path / "nobody", "unsealed", 3)
    another_machine(monkeypatch, "one secret of the team")
    assert not (team / "runs" / f"{nobody}.jsonl.seal").exists()
    home = tmp_path / "bob"
    sharing.catch_up(home)
    assert [entries[0]["pipeline"] for entries in all_runs(home)] == ["ours"]
    assert [row.to_version for row in promotions(home)] == [1]
    said = drain_problems()
    assert len(said) == 4 and sum("have no seal" in line for line in said) == 2, said
    sharing.catch_up(home)
    assert drain_problems() == [], "each is told once"
    journal = team / "runs" / f"{ours}.jsonl"
    journal.write_text(journal.read_text().replace("completed", "failed"))
    shutil.rmtree(home)
    sharing.catch_up(home)
    assert list(all_runs(home)) == [] and "not sealed" in drain_problems()[0]


def test_a_digest_is_the_same_before_and_after_json() -> None:
    content = {"key": KEY, "info": {1: (2, 3), "x": 0.1 + 0.2, "y": float("inf")}, "record": {}, "files": {}}
    assert digest_of(json.loads(json.dumps(content))) == digest_of(content)
    assert digest_of({**content, "digest": "x", "seal": "y"}) == digest_of(content)
    assert digest_of({**content, "info": {"1": [2, 4]}}) != digest_of(content)
