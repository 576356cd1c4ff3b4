"""`ctx.map` gives results in order and says how far it is, and a context forgets what a killed attempt set aside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from components.contract import Context, Draft, ReportProgress


@dataclass(frozen=True)
class Number:
    """A shard."""

    file: Path


def test_map_works_lazily_in_order_and_counts_what_was_there(tmp_path: Path) -> None:
    events: list[Any] = []
    begun: list[int] = []

    def double(shard: Number, report_progress: ReportProgress) -> int:
        begun.append(int(shard.file.name))
        report_progress(0.5)
        return 2 * begun[-1]

    ctx = Context(key="k", out=tmp_path, scratch=tmp_path, send=events.append)
    for finished in ("3", "6"):
        (tmp_path / finished).touch()
    numbers = [Number(tmp_path / str(number)) for number in range(3, 7)]
    results = ctx.map(double, numbers, what="shards")
    assert begun == []
    assert next(results) == 8 and begun == [4]
    assert list(results) == [10]
    assert [(event["done"], event["total"]) for event in events] == [(2.5, 4), (3, 4), (3.5, 4), (4, 4)]
    assert list(ctx.map(double, numbers[:1])) == []
    with pytest.raises(AssertionError, match="two shards become one file"):
        next(ctx.map(double, [Number(tmp_path / "9"), Number(tmp_path / "9")]))


def test_a_row_that_is_set_aside_is_written_and_told_and_a_new_attempt_begins_without_it(tmp_path: Path) -> None:
    events: list[Any] = []
    ctx = Context(key="k", out=tmp_path, scratch=tmp_path, send=events.append)
    ctx.set_aside("rows.jsonl", 3, "no text", "{}")
    row = json.loads((tmp_path / "set_aside.jsonl").read_text())
    assert row == {"source": "rows.jsonl", "line": 3, "why": "no text", "row": "{}"}
    assert [event["event"] for event in events] == ["set_aside"]
    Context(key="k", out=tmp_path, scratch=tmp_path)
    assert not (tmp_path / "set_aside.jsonl").exists()


def test_an_artifact_of_a_step_is_of_its_kind_and_key(tmp_path: Path) -> None:
    ctx = Context(key="k", out=tmp_path, scratch=tmp_path)
    draft = Draft.of_step(ctx, {"method": "mtp"})
    assert (type(draft), draft.key, draft.path, dict(draft.info)) == (Draft, "k", tmp_path, {"method": "mtp"})
