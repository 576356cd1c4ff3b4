"""MLflow: told from the journal whenever it is there, unharmed by concurrent first use, not needed for a run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from components.speedup.comparison.promotion_rule import judge
from storage import journal
from storage.history.query import query
from storage.journal import Journal
from storage.record import begin_run, end_run, record_failure, record_step, resync
from storage.registry.tracking import KEY_TAG, STEP_TAG, Tracker, open_client

ROOT = Path(__file__).resolve().parents[3]
METRICS = "".join(json.dumps({"step": i, "loss": 2.0 / (i + 1), "al.code": 1.5}) + "\n" for i in range(1200))


def whole_run(home: Path, make: Any, step: Any) -> str:
    """A run that reuses a target, trains a draft and fails at the benchmark."""
    run = begin_run(home, "toy", {"train_steps": 1200, "note": ""}, judge)
    target = make("t" * 64, kind="Target", step="target")
    record_step(target, "Target", step("target", "targets.load_target", "Target"), {}, run, reused=True)
    draft = make(
        "d" * 64, kind="Draft", step="draft[mtp]", files={"metrics.jsonl": METRICS, "draft.json": {"method": "mtp"}}
    )
    trained = step(
        "draft[mtp]",
        "drafts.train_draft",
        "Draft",
        {"method": "mtp", "peak_lr": 3e-4, "empty": ""},
        {"target": "target", "features": ["features[a]", "features[b]"]},
    )
    inputs = {"target": "t" * 64, "features": ["f" * 64, "e" * 64]}
    record_step(draft, "Draft", trained, {"seconds": 12.5, "inputs": inputs}, run)
    record_failure(step("acceptance"), "bench.measure_acceptance: out of memory", 3.0, run)
    end_run(run, "failed", "acceptance: out of memory")
    assert run.problems == []
    return run.run_id


def children(home: Path) -> dict[str, Any]:
    client = open_client(home)
    experiment = client.get_experiment_by_name("toy")
    return {run.data.tags[STEP_TAG]: run for run in client.search_runs([experiment.experiment_id])}


def test_a_run_has_a_child_for_each_executed_step_with_settings_metrics_lineage_and_key(with_mlflow, home, make, step):
    whole_run(home, make, step)
    runs = children(home)
    assert set(runs) == {"-", "draft[mtp]", "acceptance"}, "a reused step is no child run"
    parent, draft = runs["-"], runs["draft[mtp]"]
    assert (parent.info.status, draft.info.status, runs["acceptance"].info.status) == ("FAILED", "FINISHED", "FAILED")
    assert parent.data.params["train_steps"] == "1200" and parent.data.metrics["steps/reused"] == 1
    assert draft.data.tags["mlflow.parentRunId"] == parent.info.run_id and draft.data.tags[KEY_TAG] == "d" * 64
    assert draft.data.params["peak_lr"] == "0.0003" and draft.data.metrics["seconds"] == 12.5
    client = open_client(home)
    losses = client.get_metric_history(draft.info.run_id, "loss")
    assert len(losses) == 1200 and losses[-1].step == 1199
    lineage = {(entry.dataset.name, entry.dataset.digest) for entry in draft.inputs.dataset_inputs}
    assert lineage == {("target", "t" * 32), ("features[a]", "f" * 32), ("features[b]", "e" * 32)}
    assert [file.path for file in client.list_artifacts(draft.info.run_id)] == ["draft.json"]
    logged = next((home / "mlflow" / "artifacts").rglob("draft.json"))
    assert logged.samefile(home / "store" / ("d" * 64) / "draft.json"), "evidence would take its room twice"
    assert query("SELECT status, num_executed, num_reused FROM v_run", home)[1] == [("failed", 2, 1)]
    assert len(query("SELECT * FROM v_step", home)[1]) == 3


def test_telling_mlflow_twice_or_after_it_was_deleted_gives_each_run_once(
    with_mlflow, mlflow_template, home, make, step
):
    whole_run(home, make, step)
    before = {name: run.data.metrics for name, run in children(home).items()}
    resync(home, judge)
    assert len(open_client(home).search_runs([open_client(home).get_experiment_by_name("toy").experiment_id])) == 3
    shutil.rmtree(home / "mlflow")
    shutil.copytree(mlflow_template, home / "mlflow")  # as a new, empty database
    resync(home, judge)
    assert {name: run.data.metrics for name, run in children(home).items()} == before


def test_a_deleted_experiment_is_restored_by_the_next_run_and_by_resync(with_mlflow, home, make, step):
    whole_run(home, make, step)
    client = open_client(home)
    for tell in (lambda: whole_run(home, make, step), lambda: resync(home, judge)):
        client.delete_experiment(client.get_experiment_by_name("toy").experiment_id)
        tell()  # a run notes no problem, and a resync does not raise
        assert client.get_experiment_by_name("toy").lifecycle_stage == "active"
    assert len(client.search_runs([client.get_experiment_by_name("toy").experiment_id])) == 6, "no run twice"


def test_a_run_goes_on_when_mlflow_is_down_says_so_in_one_line_and_is_told_later(
    with_mlflow, home, make, step, monkeypatch
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody answers on the discard port
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = begin_run(home, "toy", {}, judge)
    record_step(make("d" * 64, kind="Draft"), "Draft", step("draft", kind="Draft"), {"seconds": 1.0}, run)
    end_run(run, "completed")
    assert len(run.problems) == 1 and "mlflow at http://127.0.0.1:9" in run.problems[0] and "\n" not in run.problems[0]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    resync(home, judge)
    assert {name: found.info.status for name, found in children(home).items()} == {"-": "FINISHED", "draft": "FINISHED"}


def test_a_killed_run_is_closed_and_a_step_half_logged_is_logged_again(with_mlflow, home, make, step):
    run = begin_run(home, "toy", {}, judge)
    draft = make("d" * 64, kind="Draft", files={"metrics.jsonl": METRICS})
    record_step(draft, "Draft", step("draft", kind="Draft"), {"seconds": 1.0}, run)
    open_client(home).set_tag(
        children(home)["draft"].info.run_id, "draftsmith.logged", "no"
    )  # as if it died before the end
    run.journal._file.write('{"entry": "st')  # and in the middle of a line
    run.journal._file.flush()
    assert list(journal.all_runs(home)) == [], "a run whose process lives is left alone"
    run.journal.close()
    resync(home, judge)
    runs = children(home)
    assert runs["-"].info.status == "KILLED" and runs["draft"].info.status == "FINISHED"
    assert len(open_client(home).get_metric_history(runs["draft"].info.run_id, "loss")) == 1200
    assert query("SELECT status FROM v_run", home)[1] == [("killed",)]


def test_a_journal_is_whole_after_each_entry_and_held_while_its_run_lives(home):
    opened = Journal.start(home, "toy", {"a": Path("x")}, "direct")
    opened.add("step", step="s")
    assert [entry["entry"] for entry in journal.read(opened.path)] == ["run", "step"]
    with opened.path.open("a") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    opened.close()


def test_importing_storage_imports_neither_mlflow_nor_torch_nor_prefect():
    heavy = "('mlflow', 'torch', 'prefect')"
    code = "import sys, storage.record, storage.registry.tracking, storage.registry.registry;"
    code += f"print([m for m in {heavy} if m in sys.modules])"
    said = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), check=True
    )
    assert said.stdout.strip() == "[]"


def test_a_tracker_that_starts_again_finds_what_it_logged_before(with_mlflow, home, make, step):
    run = begin_run(home, "toy", {}, judge)
    record_step(make("d" * 64, kind="Draft"), "Draft", step("draft", kind="Draft"), {"seconds": 1.0}, run)
    again = Tracker(home)
    assert again.sync(run.journal.entries) == run.tracker.parent
    assert len(children(home)) == 2
    end_run(run, "completed")


def test_a_report_stands_in_its_run_with_its_charts_and_tables(with_mlflow, home, make, step):
    page = make("p" * 64, kind="Page", step="report", files={"index.html": "<p>verdict</p>"})
    for folder, file in (("charts", "speedup.svg"), ("tables", "choices.csv"), ("other", "left-out.svg")):
        (page.path / folder).mkdir()
        (page.path / folder / file).write_text("x")
    run = begin_run(home, "toy", {}, judge)
    record_step(page, "Page", step("report[a]", "report.write_page", "Page"), {}, run)
    end_run(run, "completed")
    assert run.problems == []
    runs, client = children(home), open_client(home)

    def files(name: str, folder: str | None = None) -> list[str]:
        return [file.path for file in client.list_artifacts(runs[name].info.run_id, folder)]

    place = "report/report[a]"
    assert files("-", place) == [f"{place}/charts", f"{place}/index.html", f"{place}/tables"]
    assert files("-", f"{place}/charts") == [f"{place}/charts/speedup.svg"]
    assert files("-", f"{place}/tables") == [f"{place}/tables/choices.csv"]
    assert files("report[a]") == [], "the same report would stand in the home twice"
