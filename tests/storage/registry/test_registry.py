"""The registry: a release becomes a version once, aliases move with a log, what died half way is made up for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release, timed
from paired_runs import add as publish

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from storage import journal
from storage.artifacts.store import Store
from storage.history.write import record_artifact
from storage.record import begin_run, end_run, record_step, resync
from storage.registry import versions as model_versions
from storage.registry.fact_tags import FACTS_TAG, FILES, KEEP, OWN_TAGS, facts_in
from storage.registry.model import RegisteredVersion
from storage.registry.registry import find_release, promote, register, rollback
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


def test_a_drafter_not_worth_using_is_a_candidate_only_and_wrong_names_cost_one_line(home, make, monkeypatch):
    light_versions(monkeypatch)
    with pytest.raises(UserError, match="there is no registered model 'nosuch' \\(known: none yet\\)"):
        promote(home, "nosuch", 1, "why", judge=judge)
    made = add(home, make, "k2", verdict="do_not_speculate", target="org/Some-Model")
    assert (made.name, made.aliases) == ("org-Some-Model", ("candidate",))
    with pytest.raises(UserError, match="there is no version 7 \\(the newest is 1\\)"):
        promote(home, made.name, 7, "why", judge=judge)
    with pytest.raises(UserError, match="no earlier champion to go back to: there was none yet"):
        rollback(home, made.name, "why")
    with pytest.raises(UserError, match="say why"):
        promote(home, made.name, 1, " ", force=True, judge=judge)


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


def test_without_a_champion_the_command_that_helps_is_named_and_helps(home, make, monkeypatch):
    light_versions(monkeypatch)

    def told() -> str:
        with pytest.raises(UserError) as caught:
            find_release(home, NAME, "champion", judge)
        return str(caught.value)

    assert "draftsmith run quickstart" in told()
    publish(home, make, "k1", verdict="do_not_speculate", passed=False)
    assert "version 1 is not worth using (do not speculate); `draftsmith run toy` with more data" in told()
    publish(home, make, "k2", "d2", passed=False)
    assert f"the gate refused version 2; `draftsmith remeasure {NAME}@2` measures it again" in told()
    assert "it said: speedup: measured 1.7, asked more than 1" in told()
    made = publish(home, make, "k3", "d3", method="mtp", may_promote=False)
    assert made.waits and f"version 3 passed the gate and waits for a yes; `draftsmith promote {NAME} --why" in told()
    promote(home, NAME, reason="a look at it", judge=judge)
    assert find_release(home, NAME, "champion", judge)[0] == "k3"
    with pytest.raises(UserError, match="no earlier champion to go back to: version 3 is the first"):
        rollback(home, NAME, "why")


def test_a_champion_may_be_followed_by_a_drafter_of_another_method(home, make, monkeypatch):
    light_versions(monkeypatch)
    publish(home, make, "k1")
    record_artifact(home, make("both", rows=timed([("d1", 4, 6.0, 25), ("d2", 4, 5.0, 30)])).path)
    made = publish(home, make, "k2", "d2", method="mtp")
    assert made.decision is not None and made.decision.passed and "champion" in made.aliases, made.note
    assert {check.name for check in made.decision.checks} == {
        "own_gate", "prompts_measured_for_both", "speed_against_champion", "identical_output", "size"
    }  # fmt: skip
    assert rollback(home, NAME, "slower in production").note == f"{NAME} is back at version 1"


def test_a_target_that_a_step_made_has_no_name_of_its_own_and_goes_by_its_pipeline(home, make, monkeypatch):
    light_versions(monkeypatch)
    for key, weights in (("t1", "some"), ("t2", "others")):
        make(key, kind="Target", files={"model.safetensors": weights, "log.txt": key})
    made = [add(home, make, f"k{at}", target="", target_key=f"t{at}", draft=f"d{at}") for at in (1, 2)]
    assert [(one.name, one.version) for one in made] == [("target-of-toy", 1), ("target-of-toy", 2)]
    versions = [open_client(home).get_model_version(made[0].name, str(number)) for number in (1, 2)]
    assert "drafter for **target of toy**" in versions[0].description
    assert len({facts_in(version.tags)["draftsmith.target_revision"] for version in versions}) == 2
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
