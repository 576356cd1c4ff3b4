"""What gc may delete: not what the newest runs, running ones, or kept versions need; evidence and records stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from flows.cli import main
from storage.artifacts.store import Store
from storage.collect import collect, find_items, usage
from storage.history.query import query
from storage.history.write import rebuild, record_all
from storage.journal import Journal
from storage.registry import versions as model_versions
from storage.registry.fact_tags import FILES, KEEP, as_tags, tags_of
from storage.registry.leftovers import kept_releases, leftover_models
from storage.registry.registry import promote, register, rollback
from storage.registry.tracking import ensure_experiment, open_client
from storage.registry.versions import ReleaseFacts
from storage.repair import find_damage

Make = Callable[..., Any]


def chain(make: Make, mark: str) -> list[str]:
    """Answers, features, a drafter, its measurement: each from the one before; their keys."""
    kinds, keys = {"a": "Conversations", "f": "Features", "d": "Draft", "m": "Measurements"}, list[str]()
    for name, kind in kinds.items():
        inputs = {"what": keys[-1]} if keys else {}
        keys.append(make(f"{name}{mark}", kind=kind, files={"data": kind * 100}, inputs=inputs).key)
    return keys


def run_of(home: Path, keys: list[str], status: str = "completed") -> None:
    with closing(Journal.start(home, "toy", {}, "direct", keys=keys)) as journal:
        for before, key in zip(["", *keys], keys, strict=False):
            journal.add(
                "step", step=key, key=key, inputs={"what": [["x", before]]} if before else {}, status="completed"
            )
        journal.add("end", status=status, reason="")


def goes(home: Path, **options: Any) -> set[str]:
    return {item.key for item in find_items(home, Store(home), **{"runs": 1, "versions": 5, **options})}


def test_the_newest_runs_keep_all_and_older_ones_only_their_evidence(home: Path, make: Make) -> None:
    for mark in "12":
        run_of(home, chain(make, mark))
    assert goes(home) == {"a1", "f1", "d1"} and goes(home, runs=2) == set()
    assert goes(home, features=True) == {"a1", "f1", "d1", "f2"}
    run_of(home, ["a2", "f2"], status="killed")
    assert "f2" not in goes(home, runs=2, features=True), "the killed run would need them"
    assert find_items(home, Store(home), runs=1, versions=0)[0].kind == "Features"


def test_what_a_run_that_goes_on_may_need_stays_whoever_else_wants_it_gone(home: Path, make: Make) -> None:
    chain(make, "1")
    store = Store(home)
    store.open_staging("p1")[1].joinpath("checkpoint").write_text("half")
    items = find_items(home, store, runs=0, versions=0)
    assert {item.key for item in items} == {"a1", "f1", "d1", "p1"}
    with closing(Journal.start(home, "toy", {}, "direct", keys=["f1", "p1"])), store.lock("d1"):
        assert goes(home, runs=0) == {"a1", "d1"}
        assert {item.key for item in collect(home, store, items)} == {"a1"}, "found before the run began, and locked"
    assert {item.key for item in collect(home, store, items)} == {"d1"}, "it has ended just now: its things are recent"
    for path in (home / "runs").iterdir():
        os.utime(path, (0, 0))
    assert {item.key for item in collect(home, store, items)} == {"f1", "p1"}
    assert store.keys() == ["m1"] and not list((home / "partial").iterdir())


def test_records_history_and_lineage_lose_nothing(home: Path, make: Make) -> None:
    chain(make, "1")
    store = Store(home)
    make("f1", kind="Features", files={"data": "made again"}, inputs={"what": "a1"})  # a second session
    record_all(home, store)
    rows = "SELECT artifact_key, kind, session FROM artifact ORDER BY ALL"
    before, size = query(rows, home), sum(use.num_bytes for use in usage(home))
    done = collect(home, store, find_items(home, store, runs=0, versions=0))
    assert size - sum(use.num_bytes for use in usage(home)) >= sum(item.num_bytes for item in done) > 0
    assert store.record_of("d1")["record"]["inputs"] == {"what": "f1"} and store.resolve("d") == "d1"
    assert not list(find_damage(home, store)) and query(rows, home) == before
    rebuild(home, store)
    assert query(rows, home) == before
    make("f1", kind="Features", files={"data": "and again"})
    assert store.verify_local("f1").artifact is not None and not list(find_damage(home, store))


def test_versions_keep_what_they_serve_but_not_the_features_behind_it(
    home: Path, make: Make, with_mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    light_versions(monkeypatch)
    for mark in "123":
        chain(make, mark)
        register(home, release(make, f"r{mark}", f"d{mark}").path, judge)
    assert goes(home, runs=0) == {"f1", "f2", "f3"}, "of five versions all are kept"
    assert kept_releases(home, 0) == {"r1", "r3"}, "champion and candidate"
    assert goes(home, runs=0, versions=0) == {"f1", "f2", "f3", "a2", "d2", "r2"}
    client = open_client(home)
    client.set_model_version_tag(NAME, "2", KEEP, "yes")
    assert goes(home, runs=0, versions=0) == {"f1", "f2", "f3"}
    shutil.rmtree(home / "mlflow")
    with pytest.raises(UserError, match="draftsmith resync"):
        goes(home)


def test_a_model_that_no_version_needs_goes_from_mlflow(home: Path, with_mlflow: Path) -> None:
    client = open_client(home)
    experiment = ensure_experiment(home, client, "toy")
    models = [client.create_logged_model(experiment, name="release") for _ in range(2)]
    folders = [Path(model.artifact_location.removeprefix("file://")) for model in models]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "MLmodel").write_text("x" * 100)
    client.create_registered_model("m")
    client.create_model_version("m", folders[0].as_uri())
    assert [left.folder for left in leftover_models(home, 0, ())] == [folders[1]]
    store = Store(home)
    collect(home, store, find_items(home, store, runs=0, versions=0))
    assert folders[0].is_dir() and not folders[1].exists() and not leftover_models(home, 0, ())


def folder_of(home: Path, key: str) -> Path:
    return home / "mlflow" / "artifacts" / "toy" / "models" / f"m-{key}" / "artifacts"


def log_files(
    home: Path, release: Path, facts: ReleaseFacts, run: str | None, code: Path, restore_to: Path | None = None
) -> int:
    """A version whose files lie where MLflow's do, and share what is large with the release."""
    folder = restore_to or folder_of(home, facts.release_key)
    folder.mkdir(parents=True)
    (folder / "MLmodel").write_text("x" * 1000)
    os.link(release / "eagle3.txt", folder / "eagle3.txt")
    if restore_to is not None:
        return 0
    client = open_client(home)
    if not client.search_registered_models(f"name = '{facts.name}'"):
        client.create_registered_model(facts.name)
    return int(client.create_model_version(facts.name, folder.as_uri(), tags=as_tags(facts.tags)).version)


def test_the_files_of_a_version_go_with_its_release_and_come_back_with_it(
    home: Path, make: Make, with_mlflow: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_versions, "log_version", log_files)
    store, client = Store(home), open_client(home)
    for mark in "1234":
        register(home, release(make, f"r{mark}", f"d{mark}").path, judge)
    run_of(home, ["r3"])
    os.utime(next((home / "runs").iterdir()), (0, 0))
    items = find_items(home, store, runs=1, versions=0)
    assert {item.key for item in items} == {"r2", f"{NAME} version 2"}, "not of the newest run, nor with an alias"
    assert sum(item.num_bytes for item in items) == 1000 + len('{"al": 2.5}') + len("weights"), (
        "shared bytes count once"
    )
    assert next(use.key for use in usage(home) if use.what == "model in MLflow").startswith("m-r")

    client.set_registered_model_alias(NAME, "canary", "2")
    assert {item.key for item in collect(home, store, items)} == {"r2"} and folder_of(home, "r2").is_dir()
    client.delete_registered_model_alias(NAME, "canary")
    collect(home, store, find_items(home, store, runs=1, versions=0))
    assert [folder_of(home, f"r{mark}").is_dir() for mark in "1234"] == [True, False, True, True]
    assert goes(home, versions=0) == set() and not list(find_damage(home, store))
    assert tags_of(client, NAME, 2)["draftsmith.draft_key"] == "d2", "what it was stays known"
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    assert main(["show", NAME]) == 0
    assert "let go by draftsmith" in " ".join(capfd.readouterr().out.split())

    refusal = "version 2 cannot serve: its files were let go by draftsmith gc on .*`draftsmith run toy`"
    with pytest.raises(UserError, match=refusal):
        promote(home, NAME, 2, "we want it", force=True, judge=judge)
    client.set_registered_model_alias(NAME, "previous", "2")
    with pytest.raises(UserError, match=refusal):
        rollback(home, NAME, "back")
    assert not register(home, release(make, "r2", "d2").path, judge).is_new
    assert folder_of(home, "r2").is_dir() and FILES not in tags_of(client, NAME, 2)
    assert rollback(home, NAME, "back").version == 2
