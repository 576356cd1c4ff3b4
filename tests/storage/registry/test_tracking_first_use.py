"""A fresh home, used for the first time by six processes at once: the database and the history are whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from paired_runs import timed

from storage.history.query import query
from storage.history.write import record_artifact
from storage.registry import tracking
from storage.registry.tracking import open_client

NUM_PROCESSES = 6
# Processes of a clean server, not of this one: other tests leave threads behind, and a fork of threads may crash.
# What they import is no part of the question.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "mlflow.db",
        "mlflow.store.model_registry.sqlalchemy_store",
        "mlflow.store.tracking.sqlalchemy_store",
        "mlflow.tracking",
        "storage.history.query",
        "storage.registry.tracking",
    ]
)
pytestmark = pytest.mark.usefixtures("fresh_fork_server")
Work = Callable[[Path, int, Sequence[Path]], None]


def racer(together: Barrier, work: Work, home: Path, number: int, paths: Sequence[Path]) -> None:
    together.wait(timeout=1500)
    work(home, number, paths)


def all_at_once(work: Work, home: Path, paths: Sequence[Path] = ()) -> None:
    """Six processes that start together; every one must end well."""
    together = SERVER.Barrier(NUM_PROCESSES)
    racers = [SERVER.Process(target=racer, args=(together, work, home, n, paths)) for n in range(NUM_PROCESSES)]
    for process in racers:
        process.start()
    for process in racers:
        process.join(timeout=1500)
    assert [process.exitcode for process in racers] == [0] * NUM_PROCESSES


def first_use(home: Path, number: int, paths: Sequence[Path]) -> None:
    del paths
    client = open_client(home)
    run = client.create_run("0", run_name=str(number))
    client.set_terminated(run.info.run_id)
    client.create_registered_model(f"model-{number}")


def write_and_ask(home: Path, number: int, paths: Sequence[Path]) -> None:
    record_artifact(home, paths[number])
    found = query("SELECT count(*) FROM request WHERE artifact_key = $key", home, {"key": f"k{number}"})[1]
    assert found == [(24,)]
    assert query("SELECT count(*) > 0 FROM v_speedup", home)[1] == [(True,)]


def test_six_processes_make_one_working_mlflow_database(home: Path) -> None:
    all_at_once(first_use, home)
    client = open_client(home)
    assert {run.info.run_name for run in client.search_runs(["0"])} == {str(number) for number in range(NUM_PROCESSES)}
    assert len(client.search_registered_models()) == NUM_PROCESSES


def test_six_processes_write_and_ask_one_fresh_history(home: Path, make: Any) -> None:
    paths = [make(f"k{number}", rows=timed([("d", 3, 5.0, 20)])).path for number in range(NUM_PROCESSES)]
    all_at_once(write_and_ask, home, paths)
    assert query("SELECT count(*), count(DISTINCT artifact_key) FROM request", home)[1] == [(144, NUM_PROCESSES)]
    assert not list(home.rglob("*.tmp"))


def killed_while_making(home: Path, at: str) -> None:
    """A process that dies at this moment of the database's making."""
    child = SERVER.Process(target=dies, args=(home, at))
    child.start()
    child.join(timeout=1500)
    assert child.exitcode == -signal.SIGKILL


def dies(home: Path, at: str) -> None:
    upgrade = tracking.upgrade_database

    def die(uri: str) -> None:
        if at == "after upgrade":
            upgrade(uri)
        else:
            place = uri.removeprefix("sqlite:///")
            with sqlite3.connect(place) as half:
                half.execute("CREATE TABLE experiments (experiment_id INTEGER)")  # what the first migration begins with
        os.kill(os.getpid(), signal.SIGKILL)

    tracking.upgrade_database = die
    tracking.ensure_database(home)


@pytest.mark.parametrize("at", ["in upgrade", "after upgrade"])
def test_a_kill_while_the_database_is_made_ruins_nothing(home: Path, at: str) -> None:
    killed_while_making(home, at)
    assert not (home / "mlflow" / "mlflow.db").exists(), "it is there whole or not at all"
    assert open_client(home).get_experiment("0").name == "Default"


def test_an_upgrade_that_is_killed_leaves_the_database_as_it_was(home: Path) -> None:
    open_client(home).create_registered_model("kept")
    for ready in (home / "mlflow").glob("ready-*"):
        ready.rename(ready.with_name("ready-0.0.1"))  # as if an older MLflow had made it
    killed_while_making(home, "after upgrade")
    assert [model.name for model in open_client(home).search_registered_models()] == ["kept"]


def test_what_an_older_draftsmith_left_half_made_is_moved_aside(home: Path) -> None:
    place = home / "mlflow" / "mlflow.db"
    place.parent.mkdir(parents=True)
    with sqlite3.connect(place) as half:
        half.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    assert open_client(home).get_experiment("0").name == "Default"
    assert len(list(place.parent.glob("mlflow.db.broken-*"))) == 1
