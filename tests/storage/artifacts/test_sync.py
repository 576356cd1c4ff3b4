"""Runs, promotions and measured rows are known on every machine that shares a store, each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.rows import QualityFlag, write_rows
from storage.artifacts import remote as remote_store
from storage.artifacts import sync as sharing
from storage.artifacts.remote import VARIABLE, drain_problems
from storage.artifacts.store import Store
from storage.history.query import query
from storage.history.records import PromotionRow, now
from storage.history.write import rebuild, record_artifact, record_promotion, record_run
from storage.journal import Journal, all_runs, log_promotion, promotions


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A shared store that is turned on, and every look at it is a new one."""
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    monkeypatch.setattr(sharing, "CATCH_UP_EVERY_S", 0.0)
    remote_store._store_at.cache_clear()
    yield tmp_path / "team"
    remote_store._store_at.cache_clear()


def measure(home: Path, key: str, value: float) -> None:
    """Make an artifact with one measured row, as a run does, and keep it."""
    store = Store(home)
    out, _ = store.open_staging(key)
    write_rows(out, [QualityFlag("s", key, "mtp", "code", "info", value, "")])
    made = store.commit(key, "Measurements", {}, {"pipeline": "toy", "step": "cost", "run_id": "r1", "seconds": 1.0})
    record_artifact(home, made.path)


def run(home: Path, pipeline: str, *, ended: bool = True) -> str:
    journal = Journal.start(home, pipeline, {}, "direct")
    if ended:
        journal.add("end", status="completed", reason="")
    journal.close()
    record_run(home, journal.entries)  # as the end of a run does
    return str(journal.entries[0]["run_id"])


def move(number: int) -> PromotionRow:
    return PromotionRow(
        promotion_id=f"p{number}",
        promoted_at=now(),
        name="m",
        alias="champion",
        action="promote",
        from_version=None,
        to_version=number,
        who="ada",
        why="better",
        numbers="{}",
    )


def rows(home: Path, sql: str) -> list[tuple[Any, ...]]:
    return query(sql, home)[1]


def values(home: Path) -> list[tuple[Any, ...]]:
    return rows(home, "SELECT artifact_key, value FROM quality_flag ORDER BY ALL")


def test_measured_rows_are_asked_for_everywhere_and_artifacts_stay_where_they_are(tmp_path: Path) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    measure(ada, "k1", 1.0)
    measure(bob, "k2", 2.0)
    everything = [("k1", 1.0), ("k2", 2.0)]
    assert values(ada) == values(bob) == everything
    assert values(bob) == everything, "a second look adds nothing"
    assert Store(bob).keys() == ["k2"]
    assert rows(bob, "SELECT artifact_key, kind FROM artifact ORDER BY ALL") == [
        ("k1", "Measurements"),
        ("k2", "Measurements"),
    ]
    assert drain_problems() == []


def newest(home: Path) -> list[tuple[Any, ...]]:
    return rows(home, "SELECT artifact_key, value FROM v_flags ORDER BY ALL")


def test_an_artifact_measured_again_is_known_in_every_session_everywhere(tmp_path: Path) -> None:
    ada, bob, carol = tmp_path / "ada", tmp_path / "bob", tmp_path / "carol"
    measure(ada, "k1", 1.0)
    assert values(bob) == newest(bob) == [("k1", 1.0)]
    measure(ada, "k1", 3.0)
    for home in (bob, carol):
        assert values(home) == [("k1", 1.0), ("k1", 3.0)] and newest(home) == [("k1", 3.0)]
    measure(bob, "k1", 2.0)  # on the same machine from another home, without a look at what ada has made
    for home in (ada, bob, carol):
        assert values(home) == [("k1", 1.0), ("k1", 2.0), ("k1", 3.0)] and newest(home) == [("k1", 2.0)]
    rebuild(carol, Store(carol))
    assert values(carol) == [("k1", 1.0), ("k1", 2.0), ("k1", 3.0)] and newest(carol) == [("k1", 2.0)]
    assert drain_problems() == []


def test_an_older_session_that_is_sent_late_takes_nobody_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    monkeypatch.delenv(VARIABLE)
    for value in (1.0, 2.0):
        measure(ada, "k1", value)
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    measure(bob, "k1", 3.0)
    sharing.send(ada, everything=True)
    assert Store(bob).record_of("k1") == Store(tmp_path / "carol").record_of("k1"), "bob's is the newest"
    for home in (ada, bob):
        assert values(home) == [("k1", 1.0), ("k1", 2.0), ("k1", 3.0)] and newest(home) == [("k1", 3.0)]


def test_a_history_that_is_deleted_is_brought_again(tmp_path: Path) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    measure(ada, "k1", 1.0)
    assert values(bob) == [("k1", 1.0)]
    rebuild(bob, Store(bob))
    assert values(bob) == [("k1", 1.0)]


def test_ended_runs_and_promotions_are_known_once_everywhere(tmp_path: Path) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    ended = {run(ada, "nightly"), run(bob, "quickstart")}
    run(ada, "going-on", ended=False)
    for number, home in enumerate((ada, bob, ada), 1):
        moved = move(number)
        log_promotion(home, moved)
        record_promotion(home, moved)  # as the registry does
    for home in (ada, bob, ada, bob):
        sharing.send(home)
        sharing.catch_up(home)
    for home in (ada, bob):
        assert {row[0] for row in rows(home, "SELECT run_id FROM run")} == ended
        assert [row.to_version for row in promotions(home)] == [1, 2, 3]
        assert rows(home, "SELECT to_version FROM promotion ORDER BY 1") == [(1,), (2,), (3,)]
    assert {entries[0]["run_id"] for entries in all_runs(bob)} == ended, "a run that goes on is not sent"


def test_rows_of_another_version_cost_one_line_and_nothing_else(tmp_path: Path, shared: Path) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    store = Store(ada)
    out, _ = store.open_staging("k1")
    (out / "quality_flag.jsonl").write_text('{"surplus": 1}\n')
    store.commit("k1", "Measurements", {}, {})
    measure(ada, "k2", 2.0)
    assert values(bob) == [("k2", 2.0)]
    said = drain_problems()
    assert len(said) == 1 and "rows of k1" in said[0] and "unknown column surplus" in said[0]
    assert values(bob) == [("k2", 2.0)] and drain_problems() == [], "it is told once"


def test_an_artifact_that_cannot_be_read_holds_up_nothing_that_is_sent(tmp_path: Path) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    measure(ada, "k1", 1.0)
    (Store(ada).path_of("k1") / "artifact.json").write_text('{"key": "k1", ')
    (ada / "to_share").mkdir(exist_ok=True)
    (ada / "to_share" / "k1").touch()  # it could not be sent before
    ended = run(ada, "nightly")
    for everything in (False, True):
        sharing.send(ada, everything=everything)
        said = drain_problems()
        assert len(said) == 1 and said[0].startswith("k1 is not sent to") and "cannot be read" in said[0]
    sharing.catch_up(bob)
    assert rows(bob, "SELECT run_id FROM run") == [(ended,)]


def test_what_was_made_before_there_was_a_shared_store_is_sent_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    monkeypatch.delenv(VARIABLE)
    measure(ada, "k1", 1.0)
    assert not (ada / "to_share").exists()
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    sharing.send(ada)
    assert Store(bob).get("k1") is None
    sharing.send(ada, everything=True)
    assert Store(bob).get("k1") is not None
