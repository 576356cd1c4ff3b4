"""Newer evidence: a release that is measured again is believed by its newest numbers; the log keeps those before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, light_versions, release

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from flows.cli import main
from flows.planning.external_inputs import Sources
from storage import journal
from storage.artifacts.store import Store
from storage.history.query import query, run_named_query
from storage.history.write import rebuild
from storage.record import resync
from storage.registry import aliases as alias_moves
from storage.registry import evidence, model
from storage.registry.aliases import aliases_of
from storage.registry.fact_tags import SESSION_TAG, tags_of
from storage.registry.model import RegisteredVersion
from storage.registry.registry import notice_moves, promote, register, rollback, versions_of
from storage.registry.tracking import open_client

SLOW = {"passed": False, "speedup_meas": 0.97, "meas_lo": 0.9, "meas_hi": 1.05}


@pytest.fixture(autouse=True)
def no_model_files(with_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    light_versions(monkeypatch)


def measured(home: Path, make: Any, key: str = "k1", draft: str = "d1", **changes: Any) -> RegisteredVersion:
    """Measure a release, the first time or again, and register it."""
    return register(home, release(make, key, draft, **changes).path, judge)


def tags(home: Path, version: int = 1) -> dict[str, str]:
    return tags_of(open_client(home), NAME, version)


def aliases(home: Path) -> dict[str, int]:
    return aliases_of(open_client(home), NAME)


def entries(home: Path) -> list[Any]:
    return [row for row in journal.promotions(home) if row.action == "evidence"]


def test_promote_decides_by_the_newest_evidence_and_the_log_has_the_numbers_before(home: Path, make: Any) -> None:
    first = measured(home, make, **SLOW)
    assert "champion" not in first.aliases
    with pytest.raises(UserError, match=r"gate refuses: speedup: measured 1\.7, asked more than 1"):
        promote(home, NAME, judge=judge)
    log = (home / "promotions.jsonl").read_bytes()
    again = measured(home, make, passed=False, speedup_meas=1.2)
    assert (again.version, again.is_new, again.renewed) == (1, False, True)
    with pytest.raises(UserError, match=r"gate refuses: speedup: measured 1\.7, asked more than 1"):
        promote(home, NAME, judge=judge)
    third = register(home, release(make, "k1").path, judge, may_promote=False)
    assert third.waits and tags(home)["gate.status"] == "passed" and tags(home)["draftsmith.speedup_meas"] == "1.7"
    assert promote(home, NAME, judge=judge).decision is not None
    assert aliases(home) == {"candidate": 1, "challenger": 1, "champion": 1}
    assert (home / "promotions.jsonl").read_bytes().startswith(log)
    told = entries(home)
    assert [(row.alias, row.from_version, row.to_version) for row in told] == [("", 1, 1)] * 2
    before = [json.loads(json.loads(row.numbers)["before"]) for row in told]
    assert [one["draftsmith.speedup_meas"] for one in before] == ["0.97", "1.2"]
    assert "gate failed -> passed, speedup_meas 1.2 -> 1.7" in told[1].why
    sessions = [session.name for session in reversed(Store(home).sessions("k1"))]
    assert [one.get(SESSION_TAG) for one in before] == sessions[:2] and tags(home)[SESSION_TAG] == sessions[2]
    assert len(versions_of(home, NAME)) == 1
    rebuild(home, Store(home))
    assert query("SELECT count(*) FROM promotion WHERE action = 'evidence'", home)[1] == [(2,)]


def test_evidence_that_passes_the_gate_makes_the_champion_as_a_run_does(home: Path, make: Any) -> None:
    measured(home, make, **SLOW)
    assert "champion" in measured(home, make).aliases
    found = {(alias, version) for _, alias, version, *_ in run_named_query(home, "champions", {})[1]}
    assert found == {("candidate", 1), ("challenger", 1), ("champion", 1)}, "an entry of evidence is no alias"


def test_a_champion_whose_newest_evidence_fails_stays_and_is_told(home: Path, make: Any) -> None:
    measured(home, make)
    again = measured(home, make, **SLOW)
    assert (
        aliases(home)["champion"] == 1
        and "it stays champion, but the gate now refuses: speedup: measured" in again.note
    )
    assert "speedup" in tags(home)["gate.answer"] and tags(home)["gate.status"] == "failed"


def test_a_number_that_was_not_measured_this_time_is_not_kept_from_before(home: Path, make: Any) -> None:
    measured(home, make)
    measured(home, make, meas_lo=None, meas_hi=None, verdict="do_not_speculate")
    assert not {"draftsmith.meas_lo", "draftsmith.meas_hi"} & tags(home).keys()
    assert tags(home)["draftsmith.verdict"] == "do_not_speculate" and aliases(home)["champion"] == 1
    assert tags(home)["draftsmith.published"] == "yes" and tags(home)["gate.answer"]


def test_registering_the_same_or_an_older_session_again_changes_nothing(home: Path, make: Any) -> None:
    measured(home, make, **SLOW)
    measured(home, make)
    before = tags(home), (home / "promotions.jsonl").read_bytes()
    for session in Store(home).sessions("k1"):
        assert not register(home, session.path, judge).renewed
    resync(home, judge)
    assert (tags(home), (home / "promotions.jsonl").read_bytes()) == before
    assert notice_moves(home) == []


def test_a_version_from_before_there_were_sessions_is_given_its_first_evidence(home: Path, make: Any) -> None:
    record = release(make, "k1", **SLOW).path / "artifact.json"
    content = json.loads(record.read_text())
    del content["session"]
    record.write_text(json.dumps(content))
    register(home, record.parent, judge)
    assert SESSION_TAG not in tags(home)
    assert measured(home, make).renewed and aliases(home)["champion"] == 1


def test_a_release_that_serves_something_else_now_is_a_version_of_its_own_and_the_old_one_is_overtaken(
    home: Path, make: Any, store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured(home, make, **SLOW)
    again = measured(home, make, depth_k=1)
    assert (again.version, again.is_new) == (2, True) and set(again.aliases) == {"candidate", "challenger", "champion"}
    assert tags(home, 1)["draftsmith.depth_k"] == "4", "what a version serves never changes"
    (row,) = entries(home)
    assert (row.name, row.to_version) == (NAME, 1) and "depth_k 4 -> 1" in row.why
    assert row.why.endswith(f"what it serves now is {NAME} version 2")
    with pytest.raises(
        UserError,
        match=r"newer measurements .*: measured 0, asked 1: its release was measured again, and is .* version 2",
    ):
        promote(home, NAME, 1, judge=judge)
    assert "newer measurements" in tags(home, 1)["gate.answer"]
    newest = measured(home, make, depth_k=1, speedup_meas=1.9)
    assert (newest.version, newest.renewed) == (2, True) and tags(home, 2)["draftsmith.speedup_meas"] == "1.9"
    sources = Sources(store)
    for version, depth in ((1, 4), (2, 1)):
        sources.kind_of(f"registry:{NAME}@{version} (Release)")
        assert sources.artifacts[f"registry:{NAME}@{version} (Release)"].info["depth_k"] == depth, (
            "each is its own release"
        )
    keys = [artifact.key for artifact in sources.artifacts.values()]
    assert keys[1] == "k1" and keys[0].startswith("k1."), "other content is another input"
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    assert main(["show", NAME]) == 0 and main(["show", "k1"]) == 0 and main(["show", keys[0]]) == 0
    assert "evidence" in capfd.readouterr().out


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def test_an_invalid_measurement_is_logged_and_takes_the_place_of_no_valid_one(home: Path, make: Any) -> None:
    measured(home, make)
    before = tags(home)
    for changes in ({}, {"depth_k": 0}, {"method": "mtp", "draft": "d2"}):
        again = measured(home, make, verdict="invalid", **SLOW, **changes)  # type: ignore[arg-type]
        assert (again.version, again.is_new, again.renewed) == (1, False, False) and "does not count" in again.note
        assert tags(home) == before and len(versions_of(home, NAME)) == 1
    assert [row.why.endswith("it is invalid and does not count") for row in entries(home)] == [True] * 3
    resync(home, judge)
    assert len(entries(home)) == 3 and tags(home) == before
    assert measured(home, make, speedup_meas=1.9).renewed and tags(home)["draftsmith.speedup_meas"] == "1.9"


def test_a_valid_measurement_takes_the_place_of_an_invalid_one(home: Path, make: Any) -> None:
    measured(home, make, verdict="invalid", **SLOW)
    assert aliases(home) == {"candidate": 1}
    assert measured(home, make, verdict="invalid", **SLOW).renewed, "there is no other evidence"
    assert measured(home, make).renewed and aliases(home)["champion"] == 1


def test_another_winner_is_another_version_of_its_targets_model_and_overtakes_the_old_one(
    home: Path, make: Any
) -> None:
    measured(home, make, **SLOW)
    again = measured(home, make, draft="d2", method="mtp")
    assert (again.name, again.version, again.is_new) == (NAME, 2, True)
    with pytest.raises(UserError, match=r"newer measurements .* is builtin version 2 now"):
        promote(home, NAME, 1, judge=judge)


def test_after_a_rollback_newer_evidence_asks_the_gate_again(home: Path, make: Any) -> None:
    measured(home, make, "k1")
    measured(home, make, "k2", draft="d2")
    promote(home, NAME, 2, "we like it", judge=judge, force=True)
    rollback(home, NAME, "we do not")
    assert aliases(home)["champion"] == 1
    measured(home, make, "k1", speedup_meas=1.8)
    assert aliases(home) == {"candidate": 2, "challenger": 2, "champion": 1, "previous": 2}, "others' aliases stay"


MOMENTS = ["log", "tags", "decision", "champion", "session"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_any_moment_the_evidence_is_whole_when_it_is_registered_again(
    home: Path, make: Any, moment: str
) -> None:
    measured(home, make, **SLOW)
    again = release(make, "k1")
    child = os.fork()
    if not child:
        try:
            die_before(moment)
            register(home, again.path, judge)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for _ in range(2):
        register(home, again.path, judge)
        assert aliases(home) == {"candidate": 1, "challenger": 1, "champion": 1}
        assert tags(home)["draftsmith.speedup_meas"] == "1.7" and len(entries(home)) == 1
        assert json.loads(json.loads(entries(home)[0].numbers)["before"])["draftsmith.speedup_meas"] == "0.97"
        assert [row.action for row in journal.promotions(home) if row.alias == "champion"] == ["promote"]
    assert tags(home)[SESSION_TAG] == Store(home).sessions("k1")[0].name


def die_before(moment: str) -> None:
    def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return wrapped

    where: dict[str, tuple[Any, str]] = {
        "log": (journal, "log_promotion"),
        "tags": (evidence, "renew_tags"),
        "decision": (model, "decide"),
        "champion": (alias_moves, "move_alias"),
        "session": (evidence, "settle_session"),
    }
    module, name = where[moment]
    setattr(module, name, deadly(getattr(module, name)))
