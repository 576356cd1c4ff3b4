"""`draftsmith show` tells what an artifact is, how it came to be and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path

from toy_garden import Cli, grow

from storage.artifacts.store import Store


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
