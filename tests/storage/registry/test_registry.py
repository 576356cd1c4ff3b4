"""The registry: champions follow one another whatever their method, and every refusal names the command that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release, timed
from paired_runs import add as publish

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from storage.history.write import record_artifact
from storage.registry import versions as model_versions
from storage.registry.fact_tags import facts_in
from storage.registry.model import RegisteredVersion
from storage.registry.registry import find_release, promote, register, rollback
from storage.registry.tracking import open_client

MODEL_FILE = Path(__file__).parents[1] / "model_file.py"


@pytest.fixture(autouse=True)
def toy_model(with_mlflow, monkeypatch):
    monkeypatch.setattr(model_versions, "REQUIREMENTS", ("mlflow",))


def add(home: Path, make: Any, key: str, **changes: Any) -> RegisteredVersion:
    return register(home, release(make, key, **changes).path, judge, code=MODEL_FILE)


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
