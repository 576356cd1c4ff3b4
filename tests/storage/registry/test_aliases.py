"""Moves of aliases: gated the same way by everybody, logged for good, whole after a kill, noticed when made by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from paired_runs import NAME, add, light_versions, release, timed

from components.contract import UserError
from components.speedup.comparison.promotion_rule import judge
from flows.cli import main
from flows.services.client import PASSWORD_VARIABLE
from storage import journal
from storage.artifacts.store import Store
from storage.history.query import query
from storage.history.write import rebuild, record_artifact
from storage.record import begin_run, resync
from storage.registry import aliases as alias_moves
from storage.registry.aliases import aliases_of
from storage.registry.fact_tags import tags_of
from storage.registry.registry import find_release, notice_moves, promote, rollback
from storage.registry.tracking import open_client


@pytest.fixture(autouse=True)
def two_versions(home: Path, make: Any, with_mlflow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 is champion; version 2 was measured beside it and is slower."""
    light_versions(monkeypatch)
    slower = [("d1", 4, 5.0, 22), ("d2", 4, 6.0, 25), ("d3", 4, 4.0, 22)]
    record_artifact(home, make("run", rows=timed(slower), machine={"machine_id": "m1"}).path)
    add(home, make, "k1", "d1")
    add(home, make, "k2", "d2")


def aliases(home: Path) -> dict[str, int]:
    return aliases_of(open_client(home), NAME)


def champion_moves(home: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in journal.promotions(home) if row.alias == "champion"]
    return [(row.action, row.from_version, row.to_version) for row in rows]


def test_the_pipeline_and_the_command_ask_the_same_gate_and_the_log_keeps_every_move(home: Path, make: Any) -> None:
    assert aliases(home) == {"candidate": 2, "challenger": 2, "champion": 1}
    version = open_client(home).get_model_version(NAME, "2")
    assert tags_of(open_client(home), NAME, 2)["gate.against"] == "1"
    assert "decoding speed, as a share of the champion's: measured 0.83" in version.tags["gate.answer"]
    assert "speed_against_champion" in version.description and "measured speedup" in version.description
    with pytest.raises(UserError, match=r"gate refuses: decoding speed, .*: measured 0.83.*--force --why overrides it"):
        promote(home, NAME, judge=judge)
    with pytest.raises(UserError, match="say why"):
        promote(home, NAME, 2, force=True, judge=judge)
    before = (home / "promotions.jsonl").read_bytes()
    promote(home, NAME, 2, "our own prompts say so", force=True, judge=judge)
    assert aliases(home) == {"candidate": 2, "challenger": 2, "champion": 2, "previous": 1}
    assert "already" in promote(home, NAME, "champion", judge=judge).note
    rollback(home, NAME, "they did not")
    made = add(home, make, "k3", "d3")  # faster than the champion: promoted by the gate alone
    assert made.decision is not None and made.decision.passed and "champion" in made.aliases
    assert aliases(home) == {"candidate": 3, "challenger": 3, "champion": 3, "previous": 1}
    assert (home / "promotions.jsonl").read_bytes().startswith(before)
    rows = query(
        "SELECT action, from_version, to_version, why, numbers ->> 'draftsmith.draft_key',"
        " len(from_json(numbers ->> 'gate.comparison', '[\"JSON\"]')) FROM promotion WHERE alias = 'champion'",
        home,
    )[1]
    assert [row[:3] + row[4:] for row in rows] == [
        ("promote", None, 1, "d1", 1),
        ("force", 1, 2, "d2", 8),
        ("rollback", 2, 1, "d1", None),
        ("promote", 1, 3, "d3", 8),
    ]
    assert (
        rows[1][3].startswith("our own prompts say so; the gate refused: decoding speed")
        and rows[2][3] == "they did not"
    )
    assert "measured 1.25" in rows[3][3]
    everything = query("SELECT * FROM promotion", home)
    rebuild(home, Store(home))
    assert query("SELECT * FROM promotion", home) == everything


def test_with_an_approval_to_come_the_gate_is_asked_but_nothing_moves_not_even_later(home: Path, make: Any) -> None:
    made = add(home, make, "k3", "d3", may_promote=False)
    assert made.waits and aliases(home)["champion"] == 1
    resync(home, judge)  # compares every release again
    assert aliases(home)["champion"] == 1
    run = begin_run(home, "toy", {}, judge, may_promote=False, flow_run_id="flow-1", pipeline_digest="digest-1")
    release(make, "k4", "d3", run_id=run.run_id)
    run.journal.close()
    resync(home, judge)  # registers what was missed while MLflow was down; the approval is still to come
    assert aliases(home) == {"candidate": 4, "challenger": 4, "champion": 1}
    told = tags_of(open_client(home), NAME, 4)
    assert (told["draftsmith.flow_run_id"], told["draftsmith.pipeline_digest"]) == ("flow-1", "digest-1")
    promote(home, NAME, made.version, "approved by Ada", judge=judge)
    assert aliases(home)["champion"] == 3 and "approved by Ada; the promotion gate" in journal.promotions(home)[-1].why


def test_an_alias_moved_by_hand_is_logged_once_as_such_and_is_where_the_next_move_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert notice_moves(home) == []
    client = open_client(home)
    client.set_registered_model_alias(NAME, "champion", "2")
    client.set_registered_model_alias(NAME, "canary", "1")
    client.delete_registered_model_alias(NAME, "candidate")
    rows = notice_moves(home)
    assert [(row.alias, row.action, row.from_version, row.to_version) for row in rows] == [
        ("canary", "external", None, 1),
        ("candidate", "external", 2, None),
        ("champion", "external", 1, 2),
    ]
    assert json.loads(rows[2].numbers)["draftsmith.draft_key"] == "d2"
    assert notice_moves(home) == [] and "previous" not in aliases(home)
    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    assert main(["show", NAME]) == 0
    assert "moved in MLflow, not by Draftsmith" in capfd.readouterr().out
    assert main(["show", NAME, "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert [(version["version"], version["aliases"]) for version in shown["versions"]] == [
        (1, ["canary"]),
        (2, ["challenger", "champion"]),
    ]
    assert shown["versions"][1]["facts"]["draftsmith.draft_key"] == "d2" and not shown["changed"]
    assert [move["action"] for move in shown["log"]][-3:] == ["external"] * 3
    client.set_registered_model_alias(NAME, "champion", "1")
    promote(home, NAME, 2, "again", force=True, judge=judge)  # notices first
    assert champion_moves(home)[1:] == [("external", 1, 2), ("external", 2, 1), ("force", 1, 2)]
    found = query(
        "SELECT action, alias, to_version FROM promotion WHERE alias = 'candidate' ORDER BY promoted_at", home
    )
    assert found[1][-1] == ("external", "candidate", None)


def test_a_deleted_version_or_model_is_noticed_too(home: Path) -> None:
    client = open_client(home)
    client.delete_model_version(NAME, "2")
    assert {(row.alias, row.to_version) for row in notice_moves(home)} == {("candidate", None), ("challenger", None)}
    client.delete_registered_model(NAME)
    assert [(row.alias, row.to_version) for row in notice_moves(home)] == [("champion", None)]
    with pytest.raises(UserError, match="no registered model 'builtin' \\(known: none yet\\)"):
        promote(home, NAME, 1, judge=judge)


@pytest.mark.parametrize("lost", ["the database", "the model"])
def test_resync_gives_the_aliases_of_a_lost_registry_anew(home: Path, mlflow_template: Path, lost: str) -> None:
    before = aliases(home)
    if lost == "the model":
        open_client(home).delete_registered_model(NAME)
    else:
        new, here = (sqlite3.connect(place / "mlflow.db") for place in (mlflow_template, home / "mlflow"))
        with contextlib.closing(new), contextlib.closing(here):
            new.backup(here)  # MLflow holds the file open, so it must stay the same one
    assert aliases(home) == {}
    resync(home, judge)
    assert aliases(home) == before
    log = (home / "promotions.jsonl").read_bytes()
    resync(home, judge)
    assert aliases(home) == before and (home / "promotions.jsonl").read_bytes() == log


def test_a_new_release_that_takes_the_number_of_a_deleted_one_gets_its_aliases(home: Path, make: Any) -> None:
    open_client(home).delete_registered_model(NAME)
    made = add(home, make, "k5", "d5")
    assert made.version == 1 and set(made.aliases) == {"candidate", "challenger", "champion"}


KILLED_AT = ["intent", "previous", "champion", "log", "forget"]


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_move_killed_at_any_moment_is_whole_afterwards_and_in_the_log_once(home: Path, moment: str) -> None:
    promote(home, NAME, 2, "first", force=True, judge=judge)
    killed(home, moment, lambda: rollback(home, NAME, "killed"))
    notice_moves(home)  # any command of the registry begins with it
    done = moment != "intent"
    assert aliases(home) == {
        "candidate": 2,
        "challenger": 2,
        "champion": 1 if done else 2,
        "previous": 2 if done else 1,
    }
    assert champion_moves(home)[2:] == [("rollback", 2, 1)] * done
    assert not {row.action for row in journal.promotions(home)} & {"external"}
    assert notice_moves(home) == []
    assert not (home / "mlflow" / "moving.json").exists()


def killed(home: Path, moment: str, action: Callable[[], object]) -> None:
    """Do it in a child process that is killed with SIGKILL just before it does what `moment` names."""
    child = os.fork()
    if child == 0:
        try:
            die_before(moment)
            action()
        finally:
            os._exit(1)  # whatever happened, this is no second pytest
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the child was not killed"


def die_before(moment: str) -> None:
    from mlflow.tracking import MlflowClient

    def deadly(function: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            if when(*given):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)

        return wrapped

    set_alias = MlflowClient.set_registered_model_alias
    if moment in ("previous", "champion"):
        MlflowClient.set_registered_model_alias = deadly(set_alias, lambda _, name, alias, version: alias == moment)
    elif moment == "log":
        journal.log_promotion = deadly(journal.log_promotion, lambda *_: True)
    elif moment == "forget":
        alias_moves.Path.unlink = deadly(Path.unlink, lambda path, *_: path.name == "moving.json")
    else:
        alias_moves.write_whole = deadly(alias_moves.write_whole, lambda path, *_: path.name == "moving.json")


def test_after_a_kill_a_move_by_somebody_else_is_respected(home: Path) -> None:
    killed(home, "champion", lambda: promote(home, NAME, 2, "killed", force=True, judge=judge))
    client = open_client(home)
    other = client.create_model_version(NAME, "somewhere").version
    client.set_registered_model_alias(NAME, "champion", other)
    notice_moves(home)
    assert aliases(home)["champion"] == int(other)
    assert champion_moves(home)[1:] == [("external", 1, int(other))]


def test_a_release_is_found_by_alias_and_version(home: Path) -> None:
    assert [find_release(home, NAME, which, judge)[0] for which in ("champion", "2")] == ["k1", "k2"]
    for which, says in [("nosuch", "no version has the alias 'nosuch' \\(candidate: 2, challenger: 2, champion: 1\\)")]:
        with pytest.raises(UserError, match=says):
            find_release(home, NAME, which, judge)
    open_client(home).create_model_version(NAME, "somewhere")
    with pytest.raises(UserError, match="it was not registered by Draftsmith"):
        find_release(home, NAME, "3", judge)


AUTH_STRING = "draftsmith:of-this-test"
PENCIL = 'button[data-component-id*="modelversiontablealiasescell"]'


@contextlib.contextmanager
def mlflow_page(home: Path) -> Iterator[str]:
    """MLflow's own server on the home's database, as `draftsmith up` starts it; its address without the password."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"sqlite:///{(home / 'mlflow' / 'mlflow.db').absolute()}"
    env = {
        **os.environ,
        "MLFLOW_BACKEND_STORE_URI": uri,
        "MLFLOW_ARTIFACTS_DESTINATION": str(home / "mlflow/artifacts"),
    }
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    env[PASSWORD_VARIABLE] = AUTH_STRING
    command = [sys.executable, "-m", "flows.services.child", str(os.getpid())]
    command += [sys.executable, "-m", "uvicorn", f"--port={port}"]
    command += ["--factory", "flows.services.mlflow_server:create_app"]
    process = subprocess.Popen(command, env=env)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=600)


@pytest.mark.system
@pytest.mark.timeout(1500)
def test_an_alias_moved_in_the_page_of_mlflow_is_told_by_draftsmith(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from browser import Browser

    monkeypatch.setenv("DRAFTSMITH_HOME", str(home))
    with mlflow_page(home) as address, Browser(tmp_path / "browser", height=1200) as page:
        page.open_when_up(f"http://{AUTH_STRING}@{address}/")  # as a person who is asked for it once
        page.open(f"http://{address}/#/models/{NAME}")
        page.wait_for(f"document.querySelectorAll('{PENCIL}').length == 2")
        page.click(PENCIL)  # of version 2: the newest stands first
        page.wait_for_text("Add/Edit alias for model version 2")
        page.fill("[role=dialog] input[role=combobox]", "champion")
        page.press("Enter")
        page.screenshot(tmp_path / "1-champion.png")
        page.click("[role=dialog] button", "Save aliases")
        page.wait_for("!document.querySelector('[role=dialog]')")
        page.screenshot(tmp_path / "2-saved.png")
    assert aliases(home)["champion"] == 2
    assert main(["show", NAME]) == 0
    told = capsys.readouterr().out
    assert "external" in told, "the log says that nobody asked the gate"
    assert champion_moves(home)[-1] == ("external", 1, 2)


@pytest.mark.parametrize("left", [b"", b"{", b"null", b"\x00" * 40])
def test_a_torn_note_of_a_move_blocks_nothing(home: Path, make: Any, left: bytes) -> None:
    note = home / "mlflow" / "moving.json"
    note.write_bytes(left)
    promote(home, NAME, 2, "the note of an older move was lost", force=True, judge=judge)
    assert aliases(home)["champion"] == 2 and not note.exists()
    (kept,) = (home / "mlflow").glob("moving.broken-*")
    assert kept.read_bytes() == left, "set aside, for a person to look at"


def test_an_alias_that_moved_while_its_note_was_lost_is_in_the_log(home: Path, make: Any) -> None:
    open_client(home).set_registered_model_alias(NAME, "champion", "2")
    (home / "mlflow" / "moving.json").write_bytes(b"")
    notice_moves(home)
    assert champion_moves(home)[-1] == ("external", 1, 2)
