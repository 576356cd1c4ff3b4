"""A release becomes a version once, whole, and under its run; what died half way is made up for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.speedup.comparison.promotion_rule import judge
from storage import journal
from storage.artifacts.store import Store
from storage.record import begin_run, end_run, record_step, resync
from storage.registry import versions as model_versions
from storage.registry.fact_tags import FACTS_TAG, FILES, KEEP, OWN_TAGS, facts_in
from storage.registry.model import RegisteredVersion
from storage.registry.registry import register
from storage.registry.tracking import ensure_experiment, open_client

MODEL_FILE = Path(__file__).parents[1] / "model_file.py"


@pytest.fixture(autouse=True)
def toy_model(with_mlflow, monkeypatch):
    monkeypatch.setattr(model_versions, "REQUIREMENTS", ("mlflow",))


def add(home: Path, make: Any, key: str, **changes: Any) -> RegisteredVersion:
    return register(home, release(make, key, **changes).path, judge, code=MODEL_FILE)


def test_a_release_becomes_one_version_without_pickle_that_loads_and_carries_its_facts(home, make):
    made = add(home, make, "k1" * 32)
    log = (home / "promotions.jsonl").read_bytes()
    again = register(home, Store(home).path_of("k1" * 32), judge, code=MODEL_FILE)
    assert (again.version, again.is_new, again.renewed) == (1, False, False), "the same release never registers twice"
    assert (home / "promotions.jsonl").read_bytes() == log
    assert len(open_client(home).search_model_versions(f"name = '{NAME}'")) == 1
    assert (made.name, made.version, made.is_new, set(made.aliases)) == (
        NAME,
        1,
        True,
        {"candidate", "challenger", "champion"},
    )
    client = open_client(home)
    version = client.get_model_version_by_alias(NAME, "champion")
    facts = {"draftsmith.depth_k": "4", "draftsmith.al": "2.5", "draftsmith.meas_lo": "1.6", "gate.status": "passed"}
    assert facts.items() <= facts_in(version.tags).items() and version.tags["draftsmith.key"] == "k1" * 32
    assert version.tags.keys() == {*OWN_TAGS, FACTS_TAG} - {KEEP, FILES}, "people see few tags"
    code = (
        "import sys, mlflow; mlflow.set_tracking_uri(sys.argv[1]);"
        "print(mlflow.pyfunc.load_model('models:/builtin@champion').predict([1]))"
    )
    said = subprocess.run([sys.executable, "-c", code, client.tracking_uri], capture_output=True, text=True, check=True)
    assert said.stdout.strip().endswith("2.5")
    files = [path for path in (home / "mlflow" / "artifacts").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".pkl", ".pickle", ".bin", ".pt")]
    assert {"eagle3.txt", "release.json"} <= {path.name for path in files}


def test_a_release_without_a_run_is_registered_though_its_experiment_was_deleted(home, make):
    client = open_client(home)
    client.delete_experiment(ensure_experiment(home, client, "releases"))
    assert add(home, make, "k1").version == 1


def test_a_publication_that_died_before_its_log_is_completed(home, make, monkeypatch):
    light_versions(monkeypatch)
    with monkeypatch.context() as dying:
        dying.setattr(journal, "log_promotion", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="disk is full"):
            add(home, make, "k1")
    again = register(home, Store(home).path_of("k1"), judge)
    assert again.version == 1 and set(again.aliases) == {"candidate", "challenger", "champion"}
    assert sorted(row.alias for row in journal.promotions(home)) == ["candidate", "challenger", "champion"]


def test_a_trial_registers_nothing_not_even_later_and_the_same_run_in_earnest_does(home, make, step, monkeypatch):
    light_versions(monkeypatch)
    artifact, planned = release(make, "k1"), step("release", kind="Release")
    for trial in (True, False):
        run = begin_run(home, "toy", {}, judge, trial=trial)
        record_step(artifact, "Release", planned, {"seconds": 1.0}, run, reused=not trial)
        end_run(run, "completed")
        assert [version.name for version in run.registered] == ([] if trial else [NAME])
        assert ("`draftsmith run toy` without --trial" in run.notes[0]) is trial
        resync(home, judge)
        assert len(open_client(home).search_registered_models()) == (0 if trial else 1)


def test_keep_registers_a_release_under_its_child_run_and_says_so(home, make, step, monkeypatch):
    monkeypatch.setattr(model_versions, "MODEL_CODE", MODEL_FILE)
    artifact = release(make, "k1")
    for expected in (True, False):
        run = begin_run(home, "toy", {}, judge)
        record_step(artifact, "Release", step("release", kind="Release"), {"seconds": 1.0}, run, reused=not expected)
        end_run(run, "completed")
        assert run.problems == [] and [version.is_new for version in run.registered] == [expected]
    version = open_client(home).get_model_version(NAME, "1")
    assert open_client(home).get_run(version.run_id).data.tags["draftsmith.step"] == "release"
    assert json.loads(json.dumps(run.notes)) == [
        f"already registered: {NAME} version 1 (candidate, challenger, champion)"
    ]
