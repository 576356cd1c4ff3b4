"""How a run ended is said everywhere alike: nothing to do, not planned, interrupted, killed."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_builder import pipeline, step, written
from toy_garden import COMMAND_LINE, PACKAGES, gone

from components.contract import Artifact
from flows.execution.engine import Engine
from flows.execution.local_run import execute
from flows.planning.plan import RunOptions, plan_run
from storage import journal
from storage.artifacts.store import Store
from storage.history.query import query
from storage.registry.tracking import open_client

Cli = Callable[..., tuple[int, str, str]]
AGAIN = "; `draftsmith run quiet` looks again"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "folder"
    place.mkdir()
    return place


@pytest.fixture
def file(pipelines: Callable[[str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert Engine.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "preload", ())
    found = step("toys.gather", folder=str(folder))
    draft = step("toys.grow", {"corpus": "found"}, num_steps=2)
    return pipelines(pipeline("quiet", before=step("toys.plant"), found=found, draft=draft).text)


def test_it_is_no_failure_and_is_said_wherever_somebody_looks(
    file: Path, folder: Path, draftsmith: Cli, store: Store
) -> None:
    code, out, err = draftsmith("run", "quiet", "--direct", "-f", file)
    assert (code, err) == (0, "")
    assert "quiet: nothing new, ended after " in out and out.rstrip().endswith(f"{folder} is empty{AGAIN}")
    assert f"found   nothing new: {folder} is empty" in out and "draft " not in out
    assert [store.record_of(key)["record"]["step"] for key in sorted(store.keys())] == ["before"]
    assert list((store.home / "partial").iterdir()) == []
    (entries,) = journal.all_runs(store.home)
    end = entries[-1]
    assert (end["entry"], end["status"], end["reason"]) == (
        "end",
        "completed",
        f"nothing new: {folder} is empty{AGAIN}",
    )
    assert query("SELECT status, reason, num_executed FROM v_run", store.home)[1] == [("completed", end["reason"], 1)]
    client = open_client(store.home)
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.info.status == "FINISHED" and parent.data.tags["draftsmith.reason"] == end["reason"]
    assert {run.info.status for run in runs} == {"FINISHED"} and len(runs) == 2

    (folder / "new").touch()
    code, out, _ = draftsmith("run", "quiet", "--direct", "-f", file)
    assert code == 0 and "3 steps, 1 reused, 2 to run" in out and "nothing new" not in out
    code, out, _ = draftsmith("run", "quiet", "--direct", "-f", file)
    assert code == 0 and "3 of 3 steps reused" in out and "nothing new: same inputs" in out
    ends = sorted((entries[-1] for entries in journal.all_runs(store.home)), key=lambda end: float(end["time"]))
    reasons = [end["reason"] for end in ends]
    assert reasons[1:] == ["", "nothing new: all 3 steps are reused"]


def test_what_a_person_has_to_settle_is_said_however_a_night_ends(file: Path, folder: Path, store: Store) -> None:
    settle = "`draftsmith rollback fern --why ...` puts it back"
    options = RunOptions(file=file, home=store.home, device="cpu", packages=PACKAGES)
    endings = []
    for _ in range(3):
        plan, where = plan_run("quiet", {}, options)
        outcome = execute(dataclasses.replace(plan, remarks=(settle,)), where, how="direct")
        (folder / "seeds.txt").write_text("corn\n")
        endings.append(journal.read(store.home / "runs" / f"{outcome.run_id}.jsonl")[-1]["reason"])
        assert settle in (outcome.nothing_new or outcome.decided), "Prefect says it too"
    assert endings == [
        f"nothing new: {folder} is empty{AGAIN}; {settle}",
        settle,
        f"nothing new: all 3 steps are reused; {settle}",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device on which no byte finds room")
def test_a_run_that_a_full_disk_has_stopped_says_where_and_what_mends_it(file: Path, store: Store) -> None:
    def write(_: Engine) -> dict[str, Artifact]:
        with Path("/dev/full").open("wb", buffering=0) as stream:
            stream.write(b"x")
        return {}

    def fail(_: Engine) -> dict[str, Artifact]:
        raise RuntimeError("out of cheese")

    options = RunOptions(file=file, home=store.home, device="cpu", packages=PACKAGES)
    for run, wanted in (
        (write, f"{store.home}: cannot be written (No space left on device): `draftsmith du` shows what takes room, "),
        (fail, "RuntimeError: out of cheese"),
    ):
        with pytest.raises((OSError, RuntimeError)):
            execute(*plan_run("quiet", {}, options), how="direct", run_steps=run)
        assert ended(store)[-1][1].startswith(wanted)


def test_a_started_attempt_leaves_nothing_for_the_next(file: Path, folder: Path, draftsmith: Cli, store: Store) -> None:
    """What a quiet night wrote before it knew is not found by the night after."""
    draftsmith("run", "quiet", "--direct", "-f", file)
    (folder / "a").touch()
    assert draftsmith("run", "quiet", "--direct", "-f", file)[0] == 0
    made = next(key for key in sorted(store.keys()) if store.record_of(key)["record"]["step"] == "found")
    assert json.loads(json.dumps(store.record_of(made)["info"])) == {"num_rows": 1}


def ended(store: Store) -> list[tuple[str, str]]:
    """(status, reason) of every run in the history, oldest first; MLflow has the same, and nothing that still runs."""
    rows = query("SELECT status, coalesce(reason, '') FROM v_run ORDER BY started_at", store.home)[1]
    client = open_client(store.home)
    logged = client.search_runs(
        [e.experiment_id for e in client.search_experiments()], "tags.`draftsmith.step` = '-'", order_by=["start_time"]
    )
    words = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "killed"}
    assert [(words[run.info.status], run.data.tags["draftsmith.reason"]) for run in logged] == rows
    return [(status, reason) for status, reason in rows]


def test_a_run_that_cannot_be_planned_or_is_ended_from_outside_is_in_the_history_and_in_mlflow_too(
    pipelines: Callable[[str], Path], draftsmith: Cli, store: Store, start: Callable[..., subprocess.Popen[str]]
) -> None:
    night = pipeline("night", draft=step("toys.grow", {"corpus": "soil"}), soil=step("toys.plant", num_rows=0))
    slow = pipeline("slow", soil=step("toys.plant"), page=step("toys.hang"))
    file = pipelines(written(night, slow))
    assert draftsmith("run", "slow", "--direct", "--to", "soil", "-f", file)[0] == 0

    code, _, err = draftsmith("run", "night", "--direct", "-f", file)
    assert code == 2 and "num_rows" in err
    goes_on = "; `draftsmith run slow` goes on from what is finished"
    assert draftsmith("run", "nowhere", "-f", file)[0] == 2, "no run of a pipeline that is not there"
    status, reason = ended(store)[1]
    assert status == "failed" and "step 'soil': " in reason and reason in " ".join(err.split())

    for signum in (signal.SIGINT, signal.SIGKILL):
        process = start(COMMAND_LINE, "run", "slow", "--direct", "-f", file)
        while not (found := list((store.home / "partial").glob("*.scratch/pids"))):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        pids = found[0].read_text().split()
        found[0].unlink()
        process.send_signal(signum)
        process.communicate(timeout=600)
        assert all(gone(int(pid)) for pid in pids)
        assert ended(store)[2:] == [("killed", f"interrupted{goes_on}")], (
            "who is interrupted says so, who is killed cannot"
        )
    assert draftsmith("run", "slow", "--direct", "--to", "soil", "-f", file)[0] == 0
    assert [status for status, _ in ended(store)] == ["completed", "failed", "killed", "killed", "completed"]
    assert ended(store)[3][1] == f"the process ended without a word{goes_on}"
    code, out, _ = draftsmith("query", "failures", "--format", "json")
    assert code == 0 and [row["why"] for row in json.loads(out)] == [
        reason for _, reason in reversed(ended(store)[1:4])
    ]
