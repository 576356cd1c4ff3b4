"""Nights at tiny size, end to end: news is learned from, a quiet night ends at once, drifted traffic is reported."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_nightly import add_night, write_chats, write_first

from flows.execution.local_run import RunOutcome, execute
from flows.planning.plan import RunOptions, plan_run
from storage import journal
from storage.history.query import query

Run = Callable[..., RunOutcome]


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Run]:
    """The pipelines.yaml of a first drafter that has run, and what runs another of its pipelines."""
    (tmp_path / "m").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "m"))  # no waiting for what else this machine measures
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # down: it is not what these tests are about
    file = write_first(tmp_path)

    def run(name: str, to_step: str | None = None) -> RunOutcome:
        return execute(
            *plan_run(name, {}, RunOptions(file=file, home=tmp_path / "home", device="cpu", to_step=to_step)),
            how="direct",
        )

    return file, run


def info(outcome: RunOutcome, step: str) -> dict[str, Any]:
    return dict(outcome.artifacts[step].info)


def test_nights_go_on_from_the_champion_and_from_where_the_last_one_stopped(nights: tuple[Path, Run]) -> None:
    file, run = nights
    traffic = file.parent / "traffic"
    first = run("first", to_step="draft")
    champion = {name: first.artifacts[step].key for name, step in
                {"target": "target", "prompts": "prompts", "champion": "draft"}.items()}  # fmt: skip

    write_chats(traffic / "monday.jsonl", 24, seed=1)
    add_night(file, "monday", champion, decide=False)
    monday = run("monday")
    assert info(monday, "traffic")["new"] == 24
    assert info(monday, "mix")["origin"]["train"] == {"new": 12, "old": 12}
    assert info(monday, "draft")["continued_from"] == champion["champion"]
    assert (info(monday, "draft")["optimiser_steps"], info(monday, "draft")["optimiser_steps_before"]) == (10, 30)

    # promoted: its line has seen everything
    promoted = {**champion, "prompts": monday.artifacts["mix"].key, "champion": monday.artifacts["draft"].key}
    add_night(file, "tuesday", promoted, decide=False)
    tuesday = run("tuesday")
    assert "no conversation that the champion has not had (24 rows, 24 seen)" in tuesday.nothing_new
    assert not tuesday.artifacts

    # a new kind of text arrives
    write_chats(traffic / "wednesday.jsonl", 24, seed=3, strange=True)
    wednesday = run("tuesday", to_step="drift")
    assert (info(wednesday, "traffic")["new"], info(wednesday, "traffic")["seen"]) == (24, 24)
    assert info(wednesday, "drift")["draft_key"] == promoted["champion"]
    home = file.parent / "home"
    row = query(
        "SELECT workload, num_prompts_now, change, lo, hi, drifted FROM drift ORDER BY created_at DESC, workload", home
    )
    assert (
        row[1][0][:2] == ("all", info(wednesday, "traffic")["num_test"]) and row[1][0][3] < row[1][0][2] < row[1][0][4]
    )
    ends = sorted((entries[-1] for entries in journal.all_runs(home)), key=lambda end: float(end["time"]))
    assert [end["status"] for end in ends] == ["completed"] * 4
    assert [end["reason"][:11] for end in ends] == ["", "", "nothing new", ""]


@pytest.mark.system
@pytest.mark.timeout(1500)
def test_a_whole_night_decides_and_reports(nights: tuple[Path, Run]) -> None:
    file, run = nights
    first = run("first")
    champion = {name: first.artifacts[step].key for name, step in
                {"target": "target", "prompts": "prompts", "champion": "draft", "served": "depth"}.items()}  # fmt: skip
    write_chats(file.parent / "traffic" / "monday.jsonl", 60, seed=1)
    add_night(file, "monday", champion, decide=True)
    night = run("monday")
    policy = json.loads((night.artifacts["verdict"].path / "policy.json").read_text())
    assert policy["roles"] == {night.artifacts["draft"].key: "challenger", champion["champion"]: "champion"}
    pairs = {(row["quantity"], row["workload"]): row for row in policy["comparisons"]}
    assert pairs["decode_speed", "all"]["num_prompts"] == 6
    assert pairs["acceptance_length", "all"]["champion_key"] == champion["champion"]
    checks = {check["name"]: check for check in policy["gate"]["checks"]}
    assert checks["speed_against_champion"]["value"] == pairs["decode_speed", "all"]["lo"]
    assert {"depth_chosen_and_measured", "differs_from_champion"} <= checks.keys()
    assert info(night, "release")["draft_key"] == night.artifacts["draft"].key
    found = query("SELECT challenger_key, champion_key, lo FROM paired_comparison WHERE quantity = 'decode_speed'",
                  file.parent / "home")[1]  # fmt: skip
    assert (night.artifacts["draft"].key, champion["champion"], pairs["decode_speed", "all"]["lo"]) in found
    page = (night.artifacts["report"].path / "index.html").read_text()
    assert "Challenger against champion" in page and "Has the traffic drifted?" in page
    assert "mtp, champion" in page and "mtp, challenger" in page
