"""A fresh home, used for the first time by six processes at once: the database and the history are whole."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paired_runs import timed

from storage.results import query, remember_artifact
from storage.tracking import open_client

NUM_PROCESSES = 6
FORK = multiprocessing.get_context("fork")  # what they import is no part of the question


def all_at_once(home: Path, work: Callable[[Path, int], object]) -> None:
    """Six processes that start together; every one must end well."""
    together = FORK.Barrier(NUM_PROCESSES)

    def racer(number: int) -> None:
        together.wait(timeout=60)
        work(home, number)

    racers = [FORK.Process(target=racer, args=(number,)) for number in range(NUM_PROCESSES)]
    for process in racers:
        process.start()
    for process in racers:
        process.join(timeout=120)
    assert [process.exitcode for process in racers] == [0] * NUM_PROCESSES


def test_six_processes_make_one_working_mlflow_database(home: Path) -> None:
    import mlflow.db
    import mlflow.store.model_registry.sqlalchemy_store
    import mlflow.store.tracking.sqlalchemy_store
    import mlflow.tracking  # noqa: F401 (all before the fork)

    def first_use(home: Path, number: int) -> None:
        client = open_client(home)
        run = client.create_run("0", run_name=str(number))
        client.set_terminated(run.info.run_id)
        client.create_registered_model(f"model-{number}")

    all_at_once(home, first_use)
    client = open_client(home)
    assert {run.info.run_name for run in client.search_runs(["0"])} == {str(number) for number in range(NUM_PROCESSES)}
    assert len(client.search_registered_models()) == NUM_PROCESSES


def test_six_processes_write_and_ask_one_fresh_history(home: Path, make: Any) -> None:
    paths = [make(f"k{number}", rows=timed([("d", 3, 5.0, 20)])).path for number in range(NUM_PROCESSES)]

    def write_and_ask(home: Path, number: int) -> None:
        remember_artifact(home, paths[number])
        found = query("SELECT count(*) FROM request WHERE artifact_key = $key", home, {"key": f"k{number}"})[1]
        assert found == [(24,)]
        assert query("SELECT count(*) > 0 FROM v_speedup", home)[1] == [(True,)]

    all_at_once(home, write_and_ask)
    assert query("SELECT count(*), count(DISTINCT artifact_key) FROM request", home)[1] == [(144, NUM_PROCESSES)]
    assert not list(home.rglob("*.tmp"))
