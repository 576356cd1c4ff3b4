"""Homes that share a store share the promotion log: each move is its registry's own, and a look adds none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, add, light_versions

from components.speedup.comparison.promotion_rule import judge
from storage import journal
from storage.artifacts import remote as remote_store
from storage.artifacts import sync as sharing
from storage.artifacts.remote import VARIABLE
from storage.artifacts.store import Store
from storage.home import MARK
from storage.registry.aliases import aliases_of, mark_of
from storage.registry.registry import notice_moves, promote
from storage.registry.tracking import RELEASES, open_client, tracking_uri


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A shared store, every look at it a new one; versions without model files."""
    light_versions(monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    monkeypatch.setattr(sharing, "CATCH_UP_EVERY_S", 0.0)
    remote_store._store_at.cache_clear()
    yield
    remote_store._store_at.cache_clear()


@pytest.fixture
def homes(tmp_path: Path, mlflow_template: Path) -> tuple[Path, Path]:
    """Two homes, each with an MLflow of its own."""
    ada, bob = tmp_path / "ada", tmp_path / "bob"
    for home in (ada, bob):
        shutil.copytree(mlflow_template, home / "mlflow")
    return ada, bob


def publish(home: Path, key: str, **changes: Any) -> None:
    def make(key: str, *, kind: str, files: dict[str, Any], info: dict[str, Any], **record: Any) -> Any:
        store = Store(home)
        out, _ = store.open_staging(key)
        for name, content in files.items():
            (out / name).write_text(json.dumps(content), encoding="utf-8")
        return store.commit(key, kind, info, {"pipeline": "toy", "inputs": {}, **record})

    add(home, make, key, **changes)


def look(home: Path) -> list[tuple[str, str]]:
    """What this home finds moved by hand."""
    sharing.catch_up(home)
    return [(row.alias, row.why) for row in notice_moves(home)]


def test_moves_of_anothers_registry_are_neither_missed_here_nor_undone(homes: tuple[Path, Path]) -> None:
    ada, bob = homes
    publish(ada, "a1")
    publish(bob, "b1", draft="d9")  # the same name and number, another drafter
    publish(ada, "a2", draft="d2")
    sharing.catch_up(bob)
    log = journal.promotions(bob)
    for _ in range(2):
        assert look(ada) == look(bob) == []
    assert journal.promotions(ada) == journal.promotions(bob) == log
    assert aliases_of(open_client(bob), NAME) == {"candidate": 1, "challenger": 1, "champion": 1}
    open_client(bob).set_registered_model_alias(NAME, "canary", "1")
    assert look(bob) == [("canary", "moved in MLflow, not by Draftsmith")]
    assert look(ada) == [] and len(journal.promotions(ada)) == len(log) + 1, "it is told, and nobody's but Bob's"


def test_homes_that_share_one_mlflow_have_one_log(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ada, bob = homes
    publish(ada, "a1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(ada))
    publish(bob, "b1", draft="d2")
    promote(bob, NAME, 2, "ours", force=True, judge=judge)
    assert look(ada) == look(bob) == []
    assert mark_of(ada, open_client(ada)) == mark_of(bob, open_client(bob))
    moves = [row.to_version for row in journal.promotions(ada) if row.alias == "champion"]
    assert moves == [1, 2] and aliases_of(open_client(ada), NAME)["previous"] == 1


def test_moves_logged_before_there_were_marks_count_as_own(homes: tuple[Path, Path]) -> None:
    ada, _ = homes
    publish(ada, "a1")
    rows = [json.loads(line) for line in (ada / "promotions.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        numbers = json.loads(row["numbers"])
        assert numbers.pop(MARK) == mark_of(ada, open_client(ada))
        row["numbers"] = json.dumps(numbers)
    (ada / "promotions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert look(ada) == []
    open_client(ada).delete_registered_model_alias(NAME, "champion")
    assert look(ada) == [("champion", "deleted in MLflow")]


def test_the_mark_stays_when_its_experiment_is_deleted(homes: tuple[Path, Path]) -> None:
    client = open_client(homes[0])
    mark = mark_of(homes[0], client)
    client.delete_experiment(client.get_experiment_by_name(RELEASES).experiment_id)
    assert mark_of(homes[0], client) == mark
