"""A registered model that was deleted: nothing brings it back but a release made later, and the log keeps what was."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from storage import journal, record
from storage.artifacts.store import Store
from storage.collect import find_items
from storage.registry.registry import notice_moves, register, versions_of
from storage.registry.removal import delete_model
from storage.registry.tracking import open_client


def test_a_deleted_model_comes_back_only_with_a_later_release(
    home: Path, make: Callable[..., Any], with_mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light_versions(monkeypatch)
    for mark in "12":
        register(home, release(make, f"r{mark}", f"d{mark}").path, judge)
    with pytest.raises(UserError, match=f"no registered model 'nobody' .known: {NAME}"):
        delete_model(home, "nobody", "a slip")
    before = journal.promotions(home)
    assert delete_model(home, NAME, "served no longer") == 2
    assert not open_client(home).search_registered_models()
    logged = [(row.alias, row.action, row.to_version, row.why) for row in journal.promotions(home)[len(before) :]]
    assert logged[-1] == ("", "delete", None, "served no longer") and len(logged) > 3
    assert notice_moves(home) == []

    assert register(home, Store(home).path_of("r1"), judge).note.startswith(f"{NAME} was deleted and stays so")
    record.resync(home, judge)
    assert not open_client(home).search_registered_models()
    gone = {item.key for item in find_items(home, Store(home), runs=0, versions=5)}
    assert {"r1", "r2"} <= gone, "no version needs them"

    time.sleep(0.01)
    again = register(home, release(make, "r3", "d3").path, judge)
    assert (again.version, again.is_new) == (1, True) and "champion" in again.aliases
    record.resync(home, judge)
    assert [number for number, *_ in versions_of(home, NAME)] == [1] and notice_moves(home) == []
