"""What decides is what was sealed: who can write to MLflow passes no gate, makes no champion, names no foreign file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, add, light_versions, timed

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from flows.planning.external_inputs import Sources
from storage import journal
from storage.artifacts.store import Store
from storage.history.write import record_artifact
from storage.registry.aliases import aliases_of
from storage.registry.fact_tags import SESSION_TAG
from storage.registry.leftovers import kept_releases
from storage.registry.registry import find_release, notice_moves, promote, rollback
from storage.registry.tracking import KEY_TAG, open_client

PASSED = {"gate.status": "passed", "gate.checks": "[]"}


@pytest.fixture(autouse=True)
def two_versions(home: Path, make: Any, with_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 is champion; version 2 is faster, and failed its own gate."""
    light_versions(monkeypatch)
    faster = [("d1", 4, 5.0, 22), ("d2", 4, 4.0, 22)]
    record_artifact(home, make("run", rows=timed(faster), machine={"machine_id": "m1"}).path)
    add(home, make, "k1", "d1")
    add(home, make, "k2", "d2", passed=False)


def test_tags_that_say_the_gate_passed_pass_no_gate(home: Path) -> None:
    assert aliases_of(open_client(home), NAME)["champion"] == 1
    for name, value in PASSED.items():
        open_client(home).set_model_version_tag(NAME, "2", name, value)
    with pytest.raises(UserError, match="gate refuses: speedup: measured"):
        promote(home, NAME, 2, judge=judge)
    shutil.rmtree(Store(home).path_of("k2"))  # then the promotion log is asked, which has kept the facts
    with pytest.raises(UserError, match="gate refuses: speedup: measured"):
        promote(home, NAME, 2, judge=judge)
    journal.promotions_file(home).unlink()
    with pytest.raises(UserError, match="neither in this store nor in the promotion log"):
        promote(home, NAME, 2, judge=judge)


@pytest.mark.parametrize("there", ["k1", "../mlflow/artifacts/1/rel", "/etc", "..", "k2/../k1", ""])
def test_a_version_is_the_release_that_it_was_published_as(home: Path, there: str) -> None:
    open_client(home).set_model_version_tag(NAME, "2", KEY_TAG, there)
    said = "was published as k2" if there == "k1" else "is no key of an artifact"
    for ask in (lambda: find_release(home, NAME, "2", judge), lambda: promote(home, NAME, 2, judge=judge)):
        with pytest.raises(UserError, match=said):
            ask()
    with pytest.raises(UserError, match=said):
        Sources(Store(home)).kind_of(f"registry:{NAME}@2 (Release)")


def test_a_foreign_version_leads_to_nothing_outside_the_store(home: Path) -> None:
    """The chain of an attack: artifacts uploaded, a version whose tag is a path to them, the alias moved there."""
    uploaded = home / "mlflow" / "artifacts" / "1" / "rel"
    shutil.copytree(Store(home).path_of("k2"), uploaded)
    client = open_client(home)
    tags = {KEY_TAG: "../mlflow/artifacts/1/rel", **PASSED}
    version = client.create_model_version(NAME, "somewhere", tags=tags).version
    client.set_registered_model_alias(NAME, "champion", version)
    found = find_release(home, NAME, "champion", judge)
    assert (found.key, "is no key of an artifact" in found.remark) == ("k1", True), (
        "it leads to what was champion before"
    )


def test_a_champion_that_somebody_else_has_made_is_obeyed_when_the_gate_would_have_made_it(
    home: Path, make: Any
) -> None:
    client = open_client(home)
    client.set_registered_model_alias(NAME, "champion", "2")
    for _ in range(2):  # also when it was noticed before
        found = find_release(home, NAME, "champion", judge)
        assert found.key == "k1" and "still counts" in found.remark
        assert "the gate refuses it: speedup: measured" in found.remark
    client.delete_registered_model_alias(NAME, "champion")
    assert [row.to_version for row in notice_moves(home)] == [None]
    found = find_release(home, NAME, "champion", judge)
    assert found.key == "k1" and f"`draftsmith rollback {NAME} --why ...` puts it back" in found.remark
    client.set_registered_model_alias(NAME, "champion", "2")
    assert find_release(home, NAME, "champion", judge).key == "k1", "the way over no alias is none around the gate"
    assert find_release(home, NAME, "2", judge).key == "k2", "by number a person asks for it"
    promote(home, NAME, 2, "we know it", force=True, judge=judge)
    assert find_release(home, NAME, "champion", judge) == (*find_release(home, NAME, "2", judge)[:2], "")
    rollback(home, NAME, "we did not")
    assert find_release(home, NAME, "champion", judge).key == "k1"
    add(home, make, "k3", "d2", may_promote=False)
    client.set_registered_model_alias(NAME, "champion", "3")
    assert find_release(home, NAME, "champion", judge)[::2] == ("k3", ""), "the gate passes it"
    assert [row.action for row in journal.promotions(home) if row.alias == "champion"][-1] == "external"


def test_while_an_alias_is_disputed_nothing_is_promoted_or_freed_and_both_commands_settle_it(
    home: Path, make: Any
) -> None:
    client = open_client(home)
    client.set_registered_model_alias(NAME, "champion", "2")
    better = add(home, make, "k3", "d2")
    assert better.decision is not None and better.decision.passed and better.decision.against == 1
    assert better.waits and "champion" not in better.aliases and aliases_of(client, NAME)["champion"] == 2
    assert f"`draftsmith rollback {NAME} --why ...` puts it back" in better.note
    assert kept_releases(home, 0) >= {"k1", "k2"}, "the champion that counts is kept, and what bears the alias"
    for is_deleted in (False, True):
        if is_deleted:
            client.delete_registered_model_alias(NAME, "champion")
            assert "has deleted the alias champion" in add(home, make, "k4", "d2", may_promote=True).note
            assert kept_releases(home, 0) >= {"k1"} and "champion" not in aliases_of(client, NAME)
        rollback(home, NAME, "it was a slip")
        aliases = aliases_of(client, NAME)
        assert aliases["champion"] == 1 and "previous" not in aliases, "undone, as if it had not been"
    assert promote(home, NAME, 3, judge=judge).decision is not None
    assert {name: aliases_of(client, NAME)[name] for name in ("champion", "previous")} == {"champion": 3, "previous": 1}


def test_going_back_in_mlflow_is_a_rollback_but_not_to_what_was_rolled_back_itself(home: Path, make: Any) -> None:
    client = open_client(home)
    assert add(home, make, "k3", "d2").aliases == ("candidate", "challenger", "champion")
    client.set_registered_model_alias(NAME, "champion", "1")  # slower, so the gate would refuse it
    assert find_release(home, NAME, "champion", judge)[::2] == ("k1", "")
    rollback(home, NAME, "the move was a slip")
    assert find_release(home, NAME, "champion", judge).key == "k3", "the champion before it, not `previous`"
    rollback(home, NAME, "it breaks answers")
    client.set_registered_model_alias(NAME, "champion", "3")
    found = find_release(home, NAME, "champion", judge)
    assert found.key == "k1" and "it was rolled back: it breaks answers" in found.remark
    promote(home, NAME, 3, "mended", judge=judge)
    assert find_release(home, NAME, "champion", judge)[::2] == ("k3", "")


def test_a_session_that_a_tag_makes_up_has_no_evidence(home: Path) -> None:
    open_client(home).set_model_version_tag(NAME, "2", SESSION_TAG, "99990101-000000-aaaaaaaa")
    with pytest.raises(UserError, match="neither in this store nor in the promotion log"):
        promote(home, NAME, 2, judge=judge)


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".", "..", "/etc", "a" * 200, "k1.../x", "k1.a/b", "k\x00"])
def test_no_key_leads_out_of_the_store(home: Path, key: str) -> None:
    with pytest.raises(UserError, match="is no key"):
        Store(home).path_of(key)


def test_what_the_log_says_is_json(home: Path) -> None:
    assert all(isinstance(json.loads(row.numbers), dict) for row in journal.promotions(home))
