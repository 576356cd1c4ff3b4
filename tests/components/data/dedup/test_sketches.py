"""Sketches hold all that tells rows apart, and are the same whoever makes them and in whatever pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from near_copies import some_rows
from rows_for_deduplication import bytes_of, deduplicated, written

from components.data.dedup import clusters, sketches
from components.data.formats.chats import Chat


def test_calls_of_tools_are_not_duplicates_for_saying_nothing(tmp_path: Path) -> None:
    def call(name: str) -> Chat:
        turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name}}]}
        return Chat.of(source="s", where=name, messages=[{"role": "user", "content": "go"}, turn])

    assert len(deduplicated(tmp_path, [call("a"), call("b")]).kept) == 2


def test_bytes_do_not_depend_on_who_works_on_the_parts(tmp_path: Path) -> None:
    def backwards(function: Any, shards: Sequence[Any]) -> Iterator[Any]:
        done = {number: function(shards[number], lambda share: None) for number in reversed(range(len(shards)))}
        yield from (done[number] for number in range(len(shards)))

    given = [written(tmp_path / "given", some_rows(), 9)]
    alone = deduplicated(tmp_path, given)
    assert bytes_of(alone.made.path) == bytes_of(deduplicated(tmp_path, given, mapper=backwards).made.path)


def test_bytes_do_not_depend_on_how_much_is_sorted_or_compared_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [written(tmp_path / "given", some_rows(), 9)]
    expected = bytes_of(deduplicated(tmp_path, given).made.path)
    monkeypatch.setattr(clusters, "_KEYS_AT_ONCE", 7)
    monkeypatch.setattr(clusters, "_SHINGLES_AT_ONCE", 100)
    monkeypatch.setattr(sketches, "_BATCH_CHARACTERS", 200)
    monkeypatch.setattr(sketches, "_WRITTEN_BYTES", 2000)
    assert bytes_of(deduplicated(tmp_path, given).made.path) == expected
