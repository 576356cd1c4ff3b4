"""Sketches hold all that tells rows apart, and are the same whoever makes them and in whatever pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rows_for_deduplication import bytes_of, chat, deduplicated, document, written

from components.data.dedup import clusters, sketches
from components.data.formats.chats import Chat

WORDS = [
    f"{first}{second}" for first in ("ba", "co", "di", "fu", "ge", "ho") for second in ("lan", "mer", "nok", "pit")
]


def prose(seed: int, length: int = 60) -> list[str]:
    rng = random.Random(seed)
    return [rng.choice(WORDS) + str(rng.randrange(50)) for _ in range(length)]


def changed(words: list[str], *places: int) -> str:
    return " ".join("other" if number in places else word for number, word in enumerate(words))


def some_rows() -> list[Chat]:
    """Plain rows, exact and near duplicates of some across sources, a chain, short rows, and two languages."""
    rows = [chat(f"question {n} {changed(prose(n)[:8])}", changed(prose(n)), f"s{n % 3}") for n in range(24)]
    rows += [
        chat(f"QUESTION  {n} {changed(prose(n)[:8])}", changed(prose(n)), f"s{(n + 1) % 3}", f"x:{n}") for n in range(6)
    ]
    rows += [chat(f"question {n} {changed(prose(n)[:8])}", changed(prose(n), 30), f"s{n % 2}") for n in range(4, 12)]
    rows += [document(changed(prose(99), *range(5, 5 + 10 * step, 10)), "chain") for step in range(4)]
    rows += [chat("hi", "Hello!", "s0", "h:1"), chat("Hi", "hello!", "s1", "h:2"), chat("hi", "hello?", "s1", "h:3")]
    chinese = "唐朝的首都是长安城里有许多来自远方的商人他们带来了香料和丝绸以及各种各样的故事"
    rows += [document(chinese, "zh"), document(chinese.replace("故事", "传说"), "zh"), document(chinese[::-1], "zh")]
    return rows


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
