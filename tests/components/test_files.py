"""A shard's file is whole or absent, and `ctx.map` gives results in order and says how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torn_safetensors import killed_while_writing

from components.contract import Context, ReportProgress
from components.files import sweep, written_whole


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    with pytest.raises(RuntimeError), written_whole(file) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_whole(file) as first, written_whole(file) as second:  # two writers of the same shard
        assert first != second
        first.write_text("same")
        second.write_text("same")
        assert not file.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]
    assert file.read_text() == "same"


def test_what_killed_writers_left_is_swept_up(tmp_path: Path) -> None:
    for name in (".shard.0.tmp", "shard", "other.tmp"):
        (tmp_path / name).write_text("x")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.tmp", "shard"]


def test_what_safetensors_left_when_it_was_killed_is_swept_up(tmp_path: Path) -> None:
    """It writes under a name of its own in the same folder; what that looks like is its business, and may change."""
    torn = killed_while_writing(tmp_path)
    sweep(tmp_path)
    assert torn and not list(tmp_path.iterdir())


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
