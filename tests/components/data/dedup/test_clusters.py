"""Rows that are alike are joined, and of each group the preferred, longest row stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near_copies import changed, prose, some_rows
from rows_for_deduplication import chat, deduplicated, document

from components.data.dedup.clusters import WINDOW
from components.data.formats.chats import Chat


@pytest.mark.parametrize(
    ("settings", "stays"),
    [({}, "long:1"), ({"prefer": ["short"]}, "short:1"), ({"prefer": ["none", "short", "long"]}, "none:1")],
)
def test_the_preferred_source_stays_then_the_longer(tmp_path: Path, settings: dict[str, Any], stays: str) -> None:
    text = prose(5)
    rows = [
        chat("q", changed(text, 40), "none", "none:1"),
        chat("q", changed(text), "short", "short:1"),
        chat("q", changed(text) + " and a little more", "long", "long:1"),
    ]
    assert [row.where for row in deduplicated(tmp_path, rows, **settings).kept] == [stays]


def test_rows_that_others_connect_leave_one(tmp_path: Path) -> None:
    chain = [changed(prose(99), *range(5, 5 + 10 * step, 10)) for step in range(6)]  # neighbours are alike, no others
    found = deduplicated(tmp_path, [document(text) for text in chain], similarity=0.7)
    assert len(found.kept) == 1
    assert min(row["similarity"] for row in found.dropped) < 0.7 <= max(row["similarity"] for row in found.dropped)


def test_a_crowd_of_alike_rows_is_told_apart_as_far_as_it_differs(tmp_path: Path) -> None:
    """More rows in a band than are compared pair by pair: a template that is filled in differently."""
    frame = prose(3, 40)
    rows = []
    for group in range(3 * WINDOW):
        words = [*frame, *prose(1000 + group, 12)]
        rows += [document(changed(words)), document(changed(words, 20))]
    found = deduplicated(tmp_path, rows, similarity=0.75)
    again = deduplicated(tmp_path, [found.made], similarity=0.75)
    assert found.made.info["passes"] > 1
    assert found.dropped and not again.dropped


def test_pairs_found_are_the_pairs_that_are_there(tmp_path: Path) -> None:
    """Against all pairs compared by sets of words, one text after the other."""
    rows = some_rows()
    found = deduplicated(tmp_path, rows, num_permutations=256)
    gone = {row["where"] for row in found.dropped if row["reason"] == "near_duplicate"}
    kept = [row for row in rows if row.where not in {one["where"] for one in found.dropped}]
    for row in (row for row in rows if row.where in gone):
        assert max(_jaccard(row, other) for other in rows if other is not row) >= 0.8
    for one in kept:
        for other in kept:
            assert one is other or _jaccard(one, other) < 0.8


def _jaccard(one: Chat, other: Chat) -> float:
    units = [[*text.lower().replace("!", "").replace("?", "").split()] for text in (one.as_text(), other.as_text())]
    units = [list(words[0]) if len(words) == 1 else words for words in units]  # Chinese: by character
    grams = [{tuple(words[at : at + 5]) for at in range(len(words) - 4)} for words in units]
    return len(grams[0] & grams[1]) / max(len(grams[0] | grams[1]), 1)


def test_similarity_is_monotone(tmp_path: Path) -> None:
    counts = [deduplicated(tmp_path, some_rows(), similarity=s).made.info["num_rows"] for s in (0.3, 0.6, 0.8, 1.0)]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert np.diff(counts).min() >= 0
