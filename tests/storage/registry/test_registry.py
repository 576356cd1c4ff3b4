"""The registry: a release becomes a version once, aliases move with a log, what died half way is made up for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from storage import journal
from storage.artifacts.store import Store
from storage.record import begin_run, end_run, record_step
from storage.registry import registry
from storage.registry import versions as model_versions
from storage.registry.registry import promote, register, rollback
from storage.registry.tracking import ensure_experiment, open_client

MODEL_FILE = Path(__file__).parents[1] / "model_file.py"


@pytest.fixture(autouse=True)
def toy_model(with_mlflow, monkeypatch):
    monkeypatch.setattr(model_versions, "REQUIREMENTS", ("mlflow",))


def add(home: Path, make: Any, key: str, **changes: Any) -> registry.RegisteredVersion:
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
    assert facts.items() <= version.tags.items() and version.tags["draftsmith.key"] == "k1" * 32
    code = (
        "import sys, mlflow; mlflow.set_tracking_uri(sys.argv[1]);"
        "print(mlflow.pyfunc.load_model('models:/builtin-eagle3@champion').predict([1]))"
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


def test_a_drafter_not_worth_using_is_a_candidate_only_and_wrong_names_cost_one_line(home, make, monkeypatch):
    light_versions(monkeypatch)
    with pytest.raises(UserError, match="there is no registered model 'nosuch' \\(known: none yet\\)"):
        promote(home, "nosuch", 1, "why", judge=judge)
    made = add(home, make, "k2", verdict="do_not_speculate", target="org/Some-Model")
    assert (made.name, made.aliases) == ("org-Some-Model-eagle3", ("candidate",))
    with pytest.raises(UserError, match="there is no version 7 \\(the newest is 1\\)"):
        promote(home, made.name, 7, "why", judge=judge)
    with pytest.raises(UserError, match="no version has the alias 'previous', and none is champion"):
        rollback(home, made.name, "why")
    with pytest.raises(UserError, match="say why"):
        promote(home, made.name, 1, " ", force=True, judge=judge)


def test_a_target_that_a_step_made_has_no_name_of_its_own_and_goes_by_its_pipeline(home, make, monkeypatch):
    light_versions(monkeypatch)
    for key, weights in (("t1", "some"), ("t2", "others")):
        make(key, kind="Target", files={"model.safetensors": weights, "log.txt": key})
    made = [add(home, make, f"k{at}", target="", target_key=f"t{at}", draft=f"d{at}") for at in (1, 2)]
    assert [(one.name, one.version) for one in made] == [("target-of-toy-eagle3", 1), ("target-of-toy-eagle3", 2)]
    versions = [open_client(home).get_model_version(made[0].name, str(number)) for number in (1, 2)]
    assert "drafter for **target of toy**" in versions[0].description
    assert len({version.tags["draftsmith.target_revision"] for version in versions}) == 2
    assert set(made[0].aliases) == {"candidate", "challenger", "champion"}


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
