"""Several machines, one S3 bucket: what one has made, another reuses; kills, broken objects, outages harm nobody."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_pipeline
from object_store import BUCKET, SECRET, ObjectStore, object_store
from tiny_pipeline import DRAFTSMITH, NUM_STEPS, artifacts, write_pipeline

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
CLOSED = "http://127.0.0.1:9"  # nobody listens there


@pytest.fixture(scope="module")
def team() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline("llama", tmp_path_factory.mktemp("pipeline"))


def draftsmith(home: Path, team: ObjectStore, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line on its own home and the team's store, as a user has set it up."""
    environment = {**tiny_pipeline.environment(home), **team.environment, "COLUMNS": "400", **more}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.run(
        [DRAFTSMITH, *arguments], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )


@pytest.fixture(scope="module")
def new_home(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Callable[[str], Path]:
    """new_home(name) is a home with nothing in it but an MLflow database that is ready, since its making takes long."""

    def make(name: str) -> Path:
        home = tmp_path_factory.mktemp(name) / "home"
        shutil.copytree(mlflow_template, home / "mlflow")
        return home

    return make


def statuses(home: Path) -> list[str]:
    """What became of each step of the last run."""
    journal = max((home / "runs").glob("*.jsonl"))
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return [line["status"] for line in lines if line["entry"] == "step"]


@pytest.fixture(scope="module")
def ada(team: ObjectStore, file: Path, new_home: Callable[[str], Path]) -> Path:
    """A home that has run the whole pipeline."""
    home = new_home("ada")
    done = draftsmith(home, team, "run", "tiny", "--direct", "-f", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "shared store" not in done.stdout + done.stderr
    return home


def test_a_second_home_reuses_everything_and_runs_nothing(
    ada: Path, team: ObjectStore, file: Path, new_home: Callable[[str], Path]
) -> None:
    bob = new_home("bob")
    planned = draftsmith(bob, team, "plan", "tiny", "--json", "-f", str(file))
    assert planned.returncode == 0, planned.stderr
    steps = json.loads(planned.stdout)
    assert [step["reused"] for step in steps] == [True] * NUM_STEPS
    assert not (bob / "store").exists(), "a plan fetches nothing"

    done = draftsmith(bob, team, "run", "tiny", "--direct", "-f", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(bob) == ["reused"] * NUM_STEPS
    assert artifacts(bob) == artifacts(ada), "the very same artifacts, down to when they were finished"


def test_the_history_of_all_is_asked_for_anywhere(ada: Path, team: ObjectStore, file: Path, tmp_path: Path) -> None:
    sql = "SELECT method, depth_k, al FROM v_depth ORDER BY ALL"
    here, there = (draftsmith(home, team, "query", "--format", "csv", sql) for home in (ada, tmp_path / "carol"))
    assert there.returncode == 0, there.stderr
    assert here.stdout == there.stdout and len(there.stdout.splitlines()) > 4
    runs = draftsmith(tmp_path / "carol", team, "query", "--format", "csv", "SELECT pipeline, status FROM run")
    assert "tiny,completed" in runs.stdout
    assert not (tmp_path / "carol" / "store").exists(), "rows come without their artifacts"


def test_the_password_is_written_nowhere(ada: Path, team: ObjectStore, tmp_path: Path) -> None:
    down = draftsmith(tmp_path / "dave", team, "query", "SHOW TABLES", AWS_ENDPOINT_URL=CLOSED)
    assert "does not answer" in down.stderr and SECRET not in down.stdout + down.stderr
    for place in (ada, tmp_path):
        for path in place.rglob("*"):
            assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    client = team.client()
    for name in team.names():
        assert SECRET.encode() not in client.get_object(Bucket=BUCKET, Key=name)["Body"].read(), name


def damage(team: ObjectStore, record: dict[str, Any]) -> str:
    """Another content of the same length in place of the artifact's largest file; returns that file's name."""
    name, facts = max(record["files"].items(), key=lambda item: item[1]["size"])
    place = f"drafts/damaged/objects/{facts['sha256'][:2]}/{facts['sha256']}"
    team.client().put_object(Bucket=BUCKET, Key=place, Body=b"x" * facts["size"])
    return str(name)


def test_a_broken_object_is_refused_made_again_and_told_in_one_line(
    team: ObjectStore, file: Path, new_home: Callable[[str], Path]
) -> None:
    dan, erin, frank = new_home("dan"), new_home("erin"), new_home("frank")
    alone = {"DRAFTSMITH_STORE": f"s3://{BUCKET}/drafts/damaged"}
    first = draftsmith(dan, team, "run", "tiny", "--direct", "--to", "prompts", "-f", str(file), **alone)
    assert first.returncode == 0, first.stdout + first.stderr
    (prompts,) = artifacts(dan).values()
    name = damage(team, prompts)
    done = draftsmith(erin, team, "run", "tiny", "--direct", "--to", "prompts", "-f", str(file), **alone)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "broken" in line]
    assert len(told) == 1 and name in told[0] and prompts["key"][:12] in told[0]
    assert statuses(erin) == ["completed"]
    assert artifacts(erin)[prompts["key"]]["files"] == prompts["files"]
    again = draftsmith(frank, team, "run", "tiny", "--direct", "--to", "prompts", "-f", str(file), **alone)
    assert statuses(frank) == ["reused"] and "broken" not in again.stdout, "the shared one is whole again"


def test_an_outage_stops_no_run_and_resync_makes_up_for_it(
    team: ObjectStore, file: Path, new_home: Callable[[str], Path]
) -> None:
    grace, heidi = new_home("grace"), new_home("heidi")
    alone = {"DRAFTSMITH_STORE": f"s3://{BUCKET}/another"}
    done = draftsmith(
        grace, team, "run", "tiny", "--direct", "--to", "prompts", "-f", str(file), AWS_ENDPOINT_URL=CLOSED, **alone
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = (done.stdout + done.stderr).count("does not answer")
    assert said == 1, done.stdout + done.stderr
    still = draftsmith(grace, team, "resync", AWS_ENDPOINT_URL=CLOSED, **alone)
    assert still.returncode == 1 and "does not answer" in still.stderr

    resynced = draftsmith(grace, team, "resync", **alone)
    assert resynced.returncode == 0, resynced.stderr
    later = draftsmith(heidi, team, "run", "tiny", "--direct", "--to", "prompts", "-f", str(file), **alone)
    assert later.returncode == 0 and statuses(heidi) == ["reused"]


UPLOADER = """
import os, sys
from storage.artifacts.store import Store
store = Store(sys.argv[1])
for number in range(1000):
    out, _ = store.open_staging(f"{number:064x}")
    for part in range(6):
        (out / f"part-{part}").write_bytes(os.urandom(400_000))
    store.commit(f"{number:064x}", "Features", {}, {})
"""


@pytest.mark.parametrize("num_objects", [3, 8, 15])
def test_a_kill_in_an_upload_leaves_no_half_artifact_to_be_seen(
    team: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_objects: int
) -> None:
    for name, value in {**team.environment, "DRAFTSMITH_STORE": f"s3://{BUCKET}/drafts/{num_objects}"}.items():
        monkeypatch.setenv(name, value)
    uploader = subprocess.Popen([sys.executable, "-c", UPLOADER, str(tmp_path / "ivan")], cwd=ROOT)
    deadline = time.monotonic() + 120
    while len(team.names(f"{num_objects}/objects/")) < num_objects:
        assert uploader.poll() is None and time.monotonic() < deadline
    uploader.send_signal(signal.SIGKILL)
    uploader.wait()

    from storage.artifacts import remote as remote_store
    from storage.artifacts.store import Store

    remote_store._store_at.cache_clear()
    judy, ivan = Store(tmp_path / "judy"), Store(tmp_path / "ivan")
    assert judy.remote is not None
    shared = judy.remote.keys()
    assert shared is not None and 6 * len(shared) <= len(team.names(f"{num_objects}/objects/"))
    assert all(judy.get(key) is not None for key in shared)
    made = ivan.keys()
    assert set(made) - set(shared) <= {path.name for path in (ivan.home / "to_share").iterdir()}
    assert all(ivan.share(key) for key in made)
    assert set(judy.remote.keys() or ()) == set(made)
    assert remote_store.drain_problems() == []
    remote_store._store_at.cache_clear()
