"""Prefect and MLflow on a real PostgreSQL, artifacts in a real S3 server: two users at work at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from object_store import SECRET, ObjectStore, object_store
from postgres import PASSWORD, QUOTED, Postgres, postgres
from served_home import DRAFTSMITH, REAL, ROOT, ServedHome, served_home

from flows.services.client import client_environment
from flows.services.databases import SERVERS, on_database
from flows.services.supervisor import processes_of_home

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    with postgres() as found:
        yield found


@pytest.fixture(scope="module")
def team() -> Iterator[ObjectStore]:
    with object_store() as found:
        yield found


@pytest.fixture(scope="module")
def place(database: Postgres, team: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHome]:
    """The servers of `draftsmith up`, told where to keep things by the environment alone."""
    for name in ("prefect", "mlflow"):
        database.create(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVERS["prefect"].variable, database.url("prefect", "+asyncpg"))
        patch.setenv(SERVERS["mlflow"].variable, database.url("mlflow"))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for name, value in team.environment.items():
            patch.setenv(name, value)
        with served_home(tmp_path_factory.mktemp("postgres")) as served:
            yield served


def run_as(user: Path, place: ServedHome, num_train: int) -> subprocess.CompletedProcess[str]:
    """A run of the pipeline, with a setting of its own, on the user's own home and everybody's servers."""
    file = user / "pipelines.yaml"
    user.mkdir()
    file.write_text(REAL.with_setting("corpus", num_train=num_train).text, encoding="utf-8")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (SERVERS["prefect"].variable, SERVERS["mlflow"].variable)  # users know no database
    }
    environment |= {**client_environment(place.services), "DRAFTSMITH_HOME": str(user / "home"), "TMPDIR": str(user)}
    return subprocess.run(
        [DRAFTSMITH, "run", "corpus", "-f", str(file)],
        env=environment,
        cwd=user,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def test_two_users_run_at_once_on_one_database(place: ServedHome, database: Postgres, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ada, bob = pool.map(lambda user: run_as(tmp_path / user[0], place, user[1]), [("ada", 20), ("bob", 28)])
    for done in (ada, bob):
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resync" not in done.stdout + done.stderr, "MLflow and the store took everything"
    ended = database.ask("prefect", "SELECT state_name FROM flow_run WHERE state_type <> 'SCHEDULED'")
    assert ended == ["Completed", "Completed"]
    assert database.ask("mlflow", "SELECT status FROM runs") == ["FINISHED"] * 4, "a run and its one step, twice"
    places = database.ask("mlflow", "SELECT DISTINCT artifact_uri FROM runs")
    assert all(place.startswith("mlflow-artifacts:") for place in places), "not a folder of somebody's machine"
    assert not list(place.home.rglob("*.db")) and not list(tmp_path.rglob("*.db"))
    said = "".join(log.read_text(errors="replace") for log in (place.home / "logs").rglob("*.log"))
    assert "database is locked" not in said + ada.stderr + bob.stderr
    assert "deadlock" not in database.log()

    sql = "SELECT count(*) FROM run WHERE pipeline = 'corpus' AND status = 'completed'"
    carol = tmp_path / "carol"
    asked = subprocess.run(
        [DRAFTSMITH, "query", "--format", "csv", sql],
        env={**os.environ, "DRAFTSMITH_HOME": str(carol)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert asked.stdout.split()[1] == "2", "a third user sees the runs of both"


def test_no_password_is_kept_or_shown(place: ServedHome, tmp_path: Path) -> None:
    secrets = [PASSWORD, QUOTED, SECRET]
    for file in filter(Path.is_file, place.home.rglob("*")):
        with suppress(FileNotFoundError):  # a partial file may just be renamed
            content = file.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), file
    for process in processes_of_home(place.home):
        with suppress(psutil.NoSuchProcess):  # of a run that is just ending
            line = " ".join(process.cmdline())
            assert not any(secret in line for secret in secrets), line
    worker = psutil.Process(place.part("worker").pid).environ()
    assert not any(QUOTED in value for value in worker.values()), "runs have no business with the database"


def test_servers_that_start_at_once_migrate_one_after_the_other(database: Postgres, tmp_path: Path) -> None:
    database.create("fresh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SERVERS["mlflow"].variable, database.url("fresh"))
        command, environment = on_database("mlflow", (sys.executable, "-c", "print('started')"), os.environ)
    starting = [
        subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=1500)[0] for process in starting]
    assert [process.returncode for process in starting] == [0, 0], said
    assert all(text.endswith("started\n") for text in said), said
    assert len(database.ask("fresh", "SELECT version_num FROM alembic_version")) == 1
    assert database.ask("fresh", "SELECT experiment_id FROM experiments") == [0]
