"""Deploying is a diff: a second one changes nothing, what is gone is pruned, what somebody has paused stays paused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect_server import environment

HERE = Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def said(server: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What deploy_round_trip.py has seen."""
    place = tmp_path_factory.mktemp("deploy")
    command = [sys.executable, str(HERE / "deploy_round_trip.py"), str(place / "pipelines.yaml"), str(place / "home")]
    env = environment(place / "home", PREFECT_API_URL=server, PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_everything_is_created_once(said: dict[str, Any]) -> None:
    shared = [line for line in said["first"] if line.split()[1] in ("pool", "limit")]
    assert [line for line in said["first"] if line not in shared] == [
        "create pipeline follower",
        "create pipeline leaver",
        "create pipeline toys",
        "create schedule leaver/daily",
        "create schedule toys/nightly",
        "create schedule toys/weekly",
        "create trigger follower: after toys",
        "create trigger follower: file in/*.txt",
    ]
    assert said["again"] == []


def test_what_a_person_has_paused_stays_paused_through_a_change(said: dict[str, Any]) -> None:
    kept = ["keep pipeline toys", "keep schedule toys/nightly"]
    # Pausing a schedule makes Prefect 3.8 forget its parameters; deploying gives them back and leaves it paused.
    assert [line for line in said["paused"] if line != "update schedule toys/nightly"] == kept == said["settled"]
    assert said["toys"]["paused"] is True
    assert said["toys"]["schedules"] == [["nightly", "30 2 * * *", False, {"num_rows": 20}]]


def test_changes_are_updates_and_what_is_gone_is_pruned(said: dict[str, Any]) -> None:
    assert [line for line in said["changed"] if not line.startswith("keep")] == [
        "create trigger follower: registry builtin@champion",
        "prune pipeline leaver",
        "prune schedule toys/weekly",
        "prune trigger follower: file in/*.txt",
        "update pipeline follower",
        "update pipeline toys",
        "update schedule toys/nightly",
    ]
    assert (said["toys"]["maximum"], said["toys"]["strategy"]) == (60, "CANCEL_NEW")
    assert said["toys"]["described"] == "Rows to plant."
    assert said["triggers"] == ["follower: after toys", "follower: registry builtin@champion"]


def test_a_renamed_pipeline_keeps_what_a_person_has_paused(said: dict[str, Any]) -> None:
    assert said["switched off"] == ["fan: after toys"], "of the follower, once it was named fan"
    assert said["games"] == [True, [["nightly", False, {"num_rows": 20}]]]
    assert [line for line in said["renamed"] if not line.startswith("keep")] == []
    assert any(line.startswith("prune   pipeline  toys") for line in said["renaming toys"])


def test_another_file_on_the_same_server_prunes_nothing_of_this_one(said: dict[str, Any]) -> None:
    of_these_files = {"alone", "follower", "leaver", "toys"}  # other tests deploy to the same server
    assert of_these_files.intersection(said["there"]) == {"alone", "follower", "toys"}
    assert said["clash"].startswith("other.yaml: pipeline 'toys': the server has one of that name from ")
    assert said["beside another file"] == said["settled"]


def test_gpus_are_asked_of_a_pool_that_gives_them(said: dict[str, Any]) -> None:
    assert (said["placed"], said["placed again"]) == (["cluster", 2], [])
    assert (
        "pipeline 'alone': work pool 'draftsmith' gives no GPUs to a run: make it of a job template" in said["no gpus"]
    )


def test_the_server_refuses_a_wrong_value_and_an_unknown_name_in_one_line(said: dict[str, Any]) -> None:
    too_large, unknown, no_step = said["refused"]
    assert "field 'num_rows'" in too_large and too_large.endswith("51 is greater than the maximum of 50")
    assert "'num_row' was unexpected" in unknown
    assert "field 'from_step'" in no_step and "'sol' is not" in no_step
    assert not any("\n" in line for line in said["refused"])


def test_without_a_server_deploy_says_how_to_get_one(
    draftsmith: Callable[..., tuple[int, str, str]], pipelines: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    file = pipelines("pipelines: {toys: {steps: {soil: {uses: toys.plant}}}}")
    code, out, err = draftsmith("deploy", "--file", file)
    assert (code, out) == (2, "")
    assert err.startswith("deploy: no Prefect server runs; start one with `draftsmith up`") and err.count("\n") == 1
