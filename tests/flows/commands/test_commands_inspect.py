"""show, query, validate: what is there is told whole, what is not costs one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_garden import Cli, grow

from storage.artifacts.store import Store


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "0123456789"], "0123456789"),
        (["generate", "def add("], "generate: no drafter has been chosen yet"),
        (["query", "SELECT 1", "-p", "x=1"], "query: -p is for named queries"),
        (["query", "runs", "-p", "x"], "-p x: give it as NAME=VALUE"),
    ],
)
def test_what_is_not_there_is_told_in_one_line(arguments: list[str], message: str, draftsmith: Cli) -> None:
    code, out, err = draftsmith(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_the_named_queries_are_listed(draftsmith: Cli) -> None:
    code, out, _ = draftsmith("query", "--list", "--format", "csv")
    assert code == 0 and "runs" in out


def test_show_tells_where_an_artifact_comes_from(file: Path, draftsmith: Cli, store: Store) -> None:
    grow(file)
    key = next(key for key in sorted(store.keys()) if store.record_of(key)["kind"] == "Page")
    code, out, _ = draftsmith("show", key[:10])
    assert code == 0
    for said in (
        key,
        "toys.judge_all as step page of garden",
        "whole",
        "Measurements of step judged[moss]",
        "index.html",
    ):
        assert said in out, said
    code, out, _ = draftsmith("show", key[:10], "--json")
    assert json.loads(out)["key"] == key
