"""Training rows follow the settings, and a stratum that is too small is named."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mixed_rows import counts_of, mixed, row, stored, trained, two

from components.contract import UserError
from components.data.formats.prompts import Prompt


def test_what_is_too_small_for_its_share_is_told_and_never_repeated_unasked(tmp_path: Path) -> None:
    chats, even = two(tmp_path), {"a": 1.0, "b": 1.0}
    both = {"weights": even, "by": "rows"}
    there = counts_of(mixed(tmp_path, chats, by="rows"))
    shrunk = mixed(tmp_path, chats, **both, limit=100)
    assert counts_of(shrunk) == {"a": there["b"], "b": there["b"]}
    assert "'b' has" in shrunk.info["said"][0] and "of 100 rows so that the shares hold" in shrunk.info["said"][0]
    filled = mixed(tmp_path, chats, **both, limit=100, too_small="fill")
    assert counts_of(filled) == {"a": 100 - there["b"], "b": there["b"]}
    assert "the others go on" in filled.info["said"][0]
    repeated = mixed(tmp_path, chats, **both, limit=100, too_small="repeat")
    assert counts_of(repeated) == {"a": 50, "b": 50}
    assert "gone through again" in repeated.info["said"][0]
    ids = [prompt.prompt_id for prompt in trained(repeated)]
    assert len(set(ids)) == len(ids) == 100 and sum(one.endswith("-2") for one in ids) == 50 - there["b"]
    with pytest.raises(UserError, match=r"'b' has .* too few for its share of 50.0%"):
        mixed(tmp_path, chats, **both, limit=100, too_small="refuse")
    with pytest.raises(UserError, match=r"gone through 2 times .max_turns 1"):
        mixed(tmp_path, chats, **both, limit=100, too_small="repeat", max_turns=1)
    assert not mixed(tmp_path, chats, **both, limit=40).info["said"]


def test_orders_are_what_they_say(tmp_path: Path) -> None:
    rows = [row(name, n, 1 + (n * 7) % 30, domain="code" if n % 3 else "chat") for name in "ba" for n in range(60)]
    chats = stored(tmp_path, rows)

    def lines(order: str) -> list[Prompt]:
        return trained(mixed(tmp_path, chats, order=order))

    random_ = lines("random")
    sizes = [len(prompt.reference) for prompt in lines("short_first")]
    assert sizes == sorted(sizes) and [len(prompt.reference) for prompt in random_] != sizes
    assert [p.source for p in lines("by_source")] == sorted(p.source for p in random_)
    assert [p.domain for p in lines("by_domain")] == sorted(p.domain for p in random_)
    easy = lines("easy_first")
    assert sum(len(p.reference) for p in easy[:40]) < sum(len(p.reference) for p in easy[-40:])
    assert Counter(p.source for p in easy[:40]).most_common()[-1][1] >= 18  # both sources from the first line on
    assert {p.prompt_id for p in easy} == {p.prompt_id for p in random_}
