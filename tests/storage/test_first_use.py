"""A fresh home, used for the first time by six processes at once: the database and the history are whole."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from paired_runs import timed

from storage.results import query, remember_artifact
from storage.tracking import open_client

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
        "storage.results",
        "storage.tracking",
    ]
)
Work = Callable[[Path, int, Sequence[Path]], None]


def racer(together: Barrier, work: Work, home: Path, number: int, paths: Sequence[Path]) -> None:
    together.wait(timeout=300)
    work(home, number, paths)


def all_at_once(work: Work, home: Path, paths: Sequence[Path] = ()) -> None:
    """Six processes that start together; every one must end well."""
    together = SERVER.Barrier(NUM_PROCESSES)
    racers = [SERVER.Process(target=racer, args=(together, work, home, n, paths)) for n in range(NUM_PROCESSES)]
    for process in racers:
        process.start()
    for process in racers:
        process.join(timeout=500)
    assert [process.exitcode for process in racers] == [0] * NUM_PROCESSES


def first_use(home: Path, number: int, paths: Sequence[Path]) -> None:
    del paths
    client = open_client(home)
    run = client.create_run("0", run_name=str(number))
    client.set_terminated(run.info.run_id)
    client.create_registered_model(f"model-{number}")


def write_and_ask(home: Path, number: int, paths: Sequence[Path]) -> None:
    remember_artifact(home, paths[number])
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
