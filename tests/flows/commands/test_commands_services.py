"""up, down, status, doctor, deploy: where nothing runs each says so, and how to start it."""

from __future__ import annotations

from pathlib import Path

from toy_garden import Cli


def test_where_nothing_runs_status_says_how_to_start(home: Path, draftsmith: Cli) -> None:
    assert draftsmith("status") == (1, f"not running on {home}; start with: draftsmith up\n", "")


def test_there_is_nothing_to_stop(draftsmith: Cli) -> None:
    assert draftsmith("down") == (0, "nothing was running\n", "")


def test_a_pipelines_file_that_is_none_costs_one_line(tmp_path: Path, draftsmith: Cli) -> None:
    code, _, err = draftsmith("up", "-f", tmp_path / "absent.yaml")
    assert code == 2 and "no such pipelines file" in err and err.count("\n") == 1


def test_deploy_reads_the_file_before_it_looks_for_a_server(tmp_path: Path, draftsmith: Cli) -> None:
    code, _, err = draftsmith("deploy", "-f", tmp_path / "nosuch.yaml")
    assert code == 2 and "nosuch.yaml" in err
