"""A pipeline run in MLflow has the numbers that came out, under names that say what they are, and its evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from report_study import decided_study

from components.speedup.comparison.promotion_rule import judge
from storage.record import begin_run, end_run, record_step, resync
from storage.registry.tracking import STEP_TAG, open_client


def decided_run(home: Path, make: Any, step: Any, study: dict[str, Any], train_steps: int) -> None:
    """A run of a training and a decision, whose policy is a real one, and of its report."""
    run = begin_run(home, "toy", {"train_steps": train_steps}, judge)
    trained = make(f"{train_steps:064d}", kind="Draft", info={"held_out_al": 2.5, "best_step": 7}, peak_rss_mib=512.0)
    record_step(trained, "Draft", step("draft[mtp]", kind="Draft"), {"seconds": 12.5}, run)
    folder = study["policy"].path
    files = {file.name: file.read_text() for file in folder.iterdir() if file.is_file()}
    policy = make("p" * 64, kind="DepthPolicy", info=study["policy"].info, files=files)
    record_step(policy, "DepthPolicy", step("verdict", kind="DepthPolicy"), {"seconds": 0.5}, run)
    page = make("e" * 64, kind="Page", files={"index.html": "<title>a report</title>"})
    record_step(page, "Page", step("report", kind="Page"), {"seconds": 0.1}, run)
    end_run(run, "completed", "registered toy version 1")
    assert run.problems == []


def test_two_runs_can_be_compared_by_what_they_asked_and_what_came_out(with_mlflow, home, make, step, tmp_path):
    study = decided_study(tmp_path, num_prompts=8, seed=5)
    for train_steps in (100, 200):
        decided_run(home, make, step, study, train_steps)
    client = open_client(home)
    experiment = client.get_experiment_by_name("toy").experiment_id
    runs = client.search_runs([experiment], f"tags.`{STEP_TAG}` = '-'", order_by=["params.train_steps"])
    assert [run.data.params["train_steps"] for run in runs] == ["100", "200"]
    info = study["policy"].info
    for run in runs:
        numbers = run.data.metrics
        assert numbers["speedup/measured"] == info["speedup_meas"] and numbers["depth"] == info["depth_k"]
        assert numbers["acceptance/length_low"] == info["al_lo"] and numbers["seconds/draft.mtp"] == 12.5
        assert numbers["peak_memory_mib/draft.mtp"] == 512.0 and numbers["training/draft.mtp.held_out_al"] == 2.5
        assert numbers["bytes/all"] == sum(value for name, value in numbers.items() if name[:6] == "bytes/") / 2
        assert run.data.tags["verdict"] == info["verdict"] and run.info.run_name.startswith("toy ")
        assert f"{info['method']} at depth {info['depth_k']}, {info['speedup_meas']:.2f}x" in run.info.run_name
        curve = client.get_metric_history(run.info.run_id, f"by_depth.{info['method']}/predicted_speedup")
        assert [point.step for point in curve] == list(range(len(curve))) and curve[0].value == 1.0
        ours = {name for name in run.data.tags if not name.startswith("mlflow.")}
        assert len(ours) <= 6, "the rest stands in the description, the tables and run.json"
        report = [file.path for file in client.list_artifacts(run.info.run_id, "report/report")]
        assert "report/report/index.html" in report

    def tables() -> dict[str, int]:
        folder = Path(client.download_artifacts(runs[0].info.run_id, "evidence"))
        return {file.name: len(json.loads(file.read_text())["data"]) for file in folder.iterdir()}

    before = tables()
    assert before["steps.json"] == 3 and before["choices.json"] > 2 and before["gate.json"] > 2
    client.delete_tag(runs[0].info.run_id, "draftsmith.logged")  # as if the process had died while logging the end
    resync(home, judge)
    assert tables() == before, "logged twice, no table has a row twice"
