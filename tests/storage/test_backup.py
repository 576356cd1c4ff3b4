"""A backup is consistent while everything is being written, and what it restores is whole."""

from __future__ import annotations

import itertools
import sqlite3
import tarfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from components.contract import UserError
from storage import backup, journal
from storage.artifacts.store import Store
from storage.backup import back_up, restore
from storage.history.files import compact
from storage.history.query import query
from storage.history.write import record_artifact, record_run
from storage.home import read_identity, settle
from storage.repair import find_damage


def write(home: Path, make: Any, database: sqlite3.Connection, number: int) -> None:
    """One run: an artifact, its rows, its journal, a row of the database that names it."""
    key, kind = f"k{number % 7}", ("Draft", "Release")[number % 2]
    with Store(home).lock(key):  # as a run does: a backup finishes what nobody holds
        artifact = make(key, kind=kind, files={"weights": str(number) * 1000, "more": "same"})
    record_artifact(home, artifact.path)
    with closing(journal.Journal.start(home, "toy", {}, "direct")) as run:
        facts = {"step": "draft", "uses": "toys.grow", "kind": "Draft", "status": "completed", "why": "new"}
        run.add("step", key=artifact.key, seconds=1.0, settings={}, inputs={}, info={}, path="", **facts)
        run.add("end", status="completed", reason="")
    record_run(home, run.entries)
    if number % 5 == 4:
        compact(home, 0, whole=True)
    with database:
        database.execute("INSERT INTO run VALUES (?)", (run.entries[0]["run_id"],))


def test_a_backup_made_while_runs_write_is_whole_and_knows_all_that_it_names(
    home: Path, make: Any, tmp_path: Path
) -> None:
    file = home / "mlflow" / "mlflow.db"
    file.parent.mkdir(parents=True)
    stop, written, faults = threading.Event(), threading.Semaphore(0), list[BaseException]()

    def keep_writing() -> None:
        try:
            with closing(sqlite3.connect(file)) as database:
                database.execute("CREATE TABLE run (run_id TEXT)")
                for number in itertools.count():
                    write(home, make, database, number)
                    written.release()
                    if stop.is_set():
                        return
        except BaseException as fault:
            faults.append(fault)
            written.release(100)

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for at in range(3):
            for _ in range(6):
                written.acquire()
            back_up(home, tmp_path / f"{at}.tar")
    finally:
        stop.set()
        writer.join()
    for fault in faults:
        raise fault
    for at in range(3):
        place = tmp_path / f"home{at}"
        made = restore(tmp_path / f"{at}.tar", place)
        assert made.home == str(home) and not list(find_damage(place, Store(place)))
        with closing(sqlite3.connect(place / "mlflow" / "mlflow.db")) as database:
            named = {run_id for (run_id,) in database.execute("SELECT run_id FROM run")}
        runs = list(journal.all_runs(place))
        assert len(named) >= 6 * at + 5 and named <= {run[0]["run_id"] for run in runs}
        assert {step["key"] for run in runs for step in run if step["entry"] == "step"} <= {*Store(place).keys()}
        assert query("SELECT count(*) FROM run", place)[1][0][0] >= len(named)


def test_a_file_that_has_the_number_of_a_deleted_one_is_no_link_to_it(tmp_path: Path) -> None:
    """Compaction deletes files of the history that are in the archive already; an artifact may get their numbers."""
    old = tmp_path / "old"
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        old.write_bytes(b"old")
        backup._add(archive, tmp_path, old)
        number = old.stat().st_ino
        old.unlink()
        for at in range(200):  # until the file system gives it out again; one that never does has no such fault
            file = tmp_path / f"new{at}"
            file.write_bytes(b"new")
            if file.stat().st_ino == number:
                break
        (tmp_path / "second").hardlink_to(file)
        backup._add(archive, tmp_path, file, tmp_path / "second")
        assert [member.islnk() for member in archive.getmembers()] == [False, False]


def test_a_restored_home_is_a_copy_of_the_one_that_is_still_there(home: Path, make: Any, tmp_path: Path) -> None:
    make("k1", kind="Draft", files={"weights": "1"})
    settle(home)
    (home / "prefect").mkdir()
    (home / "prefect" / "auth").write_text("draftsmith:secret")
    back_up(home, tmp_path / "saved.tar")
    restore(tmp_path / "saved.tar", tmp_path / "new")
    assert "is a copy of" in settle(tmp_path / "new")
    before, now = read_identity(home), read_identity(tmp_path / "new")
    assert before is not None and now is not None and before.home_id != now.home_id
    assert not (tmp_path / "new" / "prefect").exists(), "a password is no part of a backup"
    (tmp_path / "other").write_bytes(b"no tar at all")
    with pytest.raises(UserError, match="cannot be read as a backup"):
        restore(tmp_path / "other", tmp_path / "third")
    with pytest.raises(UserError, match="is no home"):
        back_up(tmp_path / "nowhere", tmp_path / "x.tar")
