"""delete and rename, as they are called: what goes, what stays, and what nothing brings back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from toy_garden import Cli

from flows.execution.engine import Engine
from storage.artifacts.store import Store
from storage.history.query import query
from storage.registry.tracking import RELEASES, open_client


@pytest.fixture
def grown(file: Path, home: Path, draftsmith: Cli, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which the garden was run once, with records of everything."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert Engine.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "preload", ())
    assert draftsmith("run", "garden", "--direct", "-f", file)[0] == 0
    for path in (home / "runs").glob("*.jsonl"):  # it ended long ago: gc keeps what a run of this second uses
        os.utime(path, (0, 0))
    return home


def experiments(home: Path) -> dict[str, int]:
    """Runs by experiment of a pipeline, as MLflow's page lists them."""
    client = open_client(home)
    found = (one for one in client.search_experiments() if one.name not in ("Default", RELEASES))
    return {one.name: len(client.search_runs([one.experiment_id])) for one in found}


def kinds(store: Store) -> set[str]:
    return {store.record_of(key)["kind"] for key in store.keys()}  # noqa: SIM118


def test_a_deleted_pipeline_leaves_its_evidence_and_nothing_else(
    grown: Path, file: Path, draftsmith: Cli, store: Store
) -> None:
    delete = ("delete", "pipeline", "garden", "--why", "nobody comes", "-f", file)
    code, _, err = draftsmith(*delete)
    assert (code, err.split(" (docs")[0]) == (
        2,
        "pipelines.yaml:2: pipeline 'garden' still stands here: take it out first",
    )
    was = file.read_text()
    file.write_text(was.replace("garden:", "park:"))
    code, out, err = draftsmith(*delete)
    assert (code, err) == (0, "") and out.startswith("garden is deleted")
    assert experiments(grown) == {} and not (grown / "steps" / "garden").exists()
    rows = "SELECT pipeline, how, reason FROM v_run ORDER BY started_at"
    assert query(rows, grown)[1] == [("garden", "direct", None), ("garden", "delete", "nobody comes")]
    assert draftsmith("resync")[0] == 0 and experiments(grown) == {}, "resync brings nothing of it back"
    assert draftsmith(*delete)[0] == 0 and len(query(rows, grown)[1]) == 2, "a killed one is called again"
    code, out, _ = draftsmith("gc", "-f", file)
    assert code == 0 and kinds(store) == {"Measurements"}
    assert draftsmith("doctor")[0] == 0
    assert "no pipeline 'gardn' has run in" in draftsmith("delete", "pipeline", "gardn", "--why", "x", "-f", file)[2]

    file.write_text(was)
    assert draftsmith("run", "garden", "--direct", "-f", file)[0] == 0
    assert experiments(grown)["garden"] > 1 and "0 bytes" in draftsmith("gc", "--dry-run", "-f", file)[1]


def test_a_renamed_pipeline_goes_on_under_its_new_name(grown: Path, file: Path, draftsmith: Cli, store: Store) -> None:
    rename, before = ("rename", "garden", "park", "-f", file), experiments(grown)["garden"]
    assert "no pipeline 'park'" in draftsmith(*rename)[2]
    file.write_text(file.read_text().replace("garden:", "park:"))
    code, out, err = draftsmith(*rename)
    assert (code, err) == (0, "") and out.startswith("garden is park now")
    assert experiments(grown) == {"park": before}
    plan = draftsmith("plan", "park", "-p", "steps=9", "-f", file)[1]
    assert "setting num_steps 6 -> 9" in " ".join(plan.split()) and "never run" not in plan
    assert draftsmith("run", "park", "--direct", "-f", file)[0] == 0
    assert draftsmith("resync")[0] == 0 and set(experiments(grown)) == {"park"}
    rows = query("SELECT pipeline, how, reason FROM v_run ORDER BY started_at", grown)[1]
    assert [row[:2] for row in rows] == [("garden", "direct"), ("garden", "rename"), ("park", "direct")]
    assert draftsmith("run", "park", "--direct", "-p", "steps=9", "-f", file)[0] == 0
    assert "0 bytes" in draftsmith("gc", "--dry-run", "--runs", "3", "-f", file)[1]
    assert "Draft" in draftsmith("gc", "--dry-run", "--runs", "1", "-f", file)[1], (
        "runs of both names are counted as one"
    )


def test_a_model_that_a_pipeline_asks_for_is_not_deleted(grown: Path, file: Path, draftsmith: Cli) -> None:
    file.write_text(file.read_text().replace("      corpus:", "      # registry:toy@champion\n      corpus:"))
    delete = ("delete", "model", "toy", "--why", "x", "-f", file)
    assert "there is no registered model 'toy' (known: none yet)" in draftsmith(*delete)[2]
    text = file.read_text().replace(
        "toys.judge_all, in: {judged: judged}", "toys.judge_all, in: {judged: 'registry:toy@champion'}"
    )
    file.write_text(text)
    assert "asks for model 'toy'" in draftsmith(*delete)[2]
