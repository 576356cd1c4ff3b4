"""Sketches hold all that tells rows apart, and are the same whoever makes them and in whatever pieces.

MinHash signatures are datasketch's, estimates lie within their standard error, bands meet as the S-curve says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near_copies import some_rows
from rows_for_deduplication import bytes_of, deduplicated, written

from components.data.dedup import deduplicate as clusters
from components.data.dedup import sketches
from components.data.dedup.sketches import (
    MIN_RECALL,
    Banding,
    band_keys,
    banding,
    permutations,
    shingle_sets,
    signatures,
)
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


PERMUTATIONS = 256


def pairs_of_sets(similarity: float, num_pairs: int, size: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """2 num_pairs sets, each pair with this Jaccard index: (values, offsets)."""
    rng = np.random.default_rng(7)
    shared = round(2 * size * similarity / (1 + similarity))
    sets = []
    for _ in range(num_pairs):
        drawn = rng.choice(1 << 32, 2 * size - shared, replace=False).astype(np.uint32)
        sets += [np.sort(drawn[:size]), np.sort(drawn[size - shared :])]
    return np.concatenate(sets), np.arange(2 * num_pairs + 1) * size


def test_signatures_are_those_of_datasketch() -> None:
    datasketch = pytest.importorskip("datasketch", minversion="2")
    rng = np.random.default_rng(0)
    sets = [np.unique(rng.integers(0, 1 << 32, size, dtype=np.uint32)) for size in (1, 7, 300)]
    found = signatures(np.concatenate(sets), np.cumsum([0, *map(len, sets)]), PERMUTATIONS)
    for number, one in enumerate(sets):
        theirs = datasketch.MinHash(PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")
        theirs.update_batch(one.tolist())
        np.testing.assert_array_equal(found[:, number], theirs.hashvalues)


@pytest.mark.parametrize("similarity", [0.2, 0.5, 0.8, 0.95])
def test_estimates_lie_within_their_standard_error(similarity: float) -> None:
    num_pairs = 200
    found = signatures(*pairs_of_sets(similarity, num_pairs), PERMUTATIONS)
    estimates = (found[:, 0::2] == found[:, 1::2]).mean(axis=0)
    exact = round(600 * similarity / (1 + similarity)) / (600 - round(600 * similarity / (1 + similarity)))
    error = math.sqrt(exact * (1 - exact) / PERMUTATIONS)
    assert abs(estimates.mean() - exact) < 4 * error / math.sqrt(num_pairs)  # no bias
    assert 0.8 * error < estimates.std() < 1.25 * error  # and the spread that theory gives


def test_permutations_are_bijections_and_differ() -> None:
    factors, summands = permutations(128)
    assert (factors % 2 == 1).all()
    assert len(set(zip(factors.tolist(), summands.tolist(), strict=True))) == 128


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_are_the_longest_that_keep_the_recall(similarity: float) -> None:
    cut = banding(similarity, 128)
    assert cut.num_bands * cut.band_length <= 128
    assert cut.chance(similarity) >= MIN_RECALL
    longer = range(cut.band_length + 1, 129)
    assert all(Banding(128 // length, length).chance(similarity) < MIN_RECALL for length in longer)


def test_the_table_in_the_docstring_is_right() -> None:
    assert banding(0.7, 128) == Banding(32, 4) and banding(0.9, 128) == Banding(12, 10)
    cut = banding(0.8, 128)
    assert cut == Banding(21, 6)
    assert [round(cut.chance(s), 3) for s in (0.3, 0.5, 0.6, 0.7, 0.8)] == [0.015, 0.282, 0.633, 0.928, 0.998]


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.9])
def test_pairs_meet_in_a_band_as_often_as_the_curve_says(similarity: float) -> None:
    cut, num_pairs = banding(0.8, 128), 400
    keys = band_keys(signatures(*pairs_of_sets(similarity, num_pairs, 200), 128), cut)
    met = (keys[:, 0::2] == keys[:, 1::2]).any(axis=0).mean()
    chance = cut.chance(similarity)
    assert abs(met - chance) < 4 * math.sqrt(max(chance * (1 - chance), 0.002) / num_pairs)


def test_shingle_sets_are_sorted_and_distinct_by_text() -> None:
    hashes = np.array([5, 3, 5, 9, 3], np.uint64) << np.uint64(32)
    values, offsets = shingle_sets(hashes, np.array([0, 3, 3, 5]))
    assert values.tolist() == [3, 5, 3, 9]
    assert offsets.tolist() == [0, 2, 2, 4]
