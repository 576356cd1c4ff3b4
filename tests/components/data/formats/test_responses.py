"""A shard of conversations is read as it was written."""

from __future__ import annotations

from components.data.formats.responses import distinct_bigram_ratio


def test_distinct_bigrams() -> None:
    assert distinct_bigram_ratio([1, 2, 3, 4]) == 1.0
    assert distinct_bigram_ratio([1, 1, 1, 1, 1]) == 0.25
    assert distinct_bigram_ratio([1]) == 1.0
