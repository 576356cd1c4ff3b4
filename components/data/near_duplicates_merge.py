"""Which rows say the same: band hashes on disk, sorted band by band; equal neighbours compared; one row of each kept.

The other half of `data.deduplicate`. A few numbers a row are in memory (about a hundred bytes); band hashes and
shingles stay in the sketches and are read a range of hashes at a time, so any number of rows can be sorted.

Which row stays: rows are put in an order that depends on their content alone (the preferred source, then the longer,
then the smaller row_id), and of rows that belong together the first stays. Which belong together: exact duplicates by
their digest; near duplicates where the Jaccard index of two rows' shingles is at least `similarity`, and what such
pairs connect (single linkage: A ~ B ~ C keeps A alone, also where A and C are less alike). The result is the same
whatever the order of the rows or the number of workers.

Of rows with one band hash every pair within WINDOW places of the order is compared, and each with the first: a
boilerplate that ten thousand rows share costs a multiple of them, not their square. Where a group was larger, all is
done again with the rows that are left, until nothing more falls: so deduplicating twice removes nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from components.data.near_duplicates_sketch import CLEAN
from components.data.near_duplicates_table import Sketches

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Small = NDArray[np.uint32]
    Places = NDArray[np.int64]
    Marks = NDArray[np.bool_]

WINDOW: Final = 16
_KEYS_AT_ONCE: Final = 1 << 22
_SHINGLES_AT_ONCE: Final = 1 << 22


@dataclass(frozen=True)
class Verdict:
    """What becomes of each row, by its place in the input.

    kept_by: the row that stays instead of it; its own place where it stays itself. reason: "", "exact_duplicate",
    "near_duplicate" or "contaminated" (numbers in REASONS). item: of a contaminated row, else CLEAN.
    """

    kept_by: Places
    reason: NDArray[np.uint8]
    item: NDArray[np.int32]
    num_passes: int


REASONS: Final = ("", "exact_duplicate", "near_duplicate", "contaminated")
EXACT, NEAR, CONTAMINATED = 1, 2, 3


def judge(
    sketches: Sketches, num_bands: int, similarity: float, tell: Callable[[int, int], None] = lambda done, total: None
) -> Verdict:
    """What becomes of every row; contaminated ones go first, so that a clean near duplicate of them can stay.

    similarity: Jaccard index from which rows are near duplicates. tell: called with (bands done, bands in all).
    """
    num_rows = sketches.num_rows
    item = sketches.column("item").astype(np.int32)
    reason = np.where(item != CLEAN, CONTAMINATED, 0).astype(np.uint8)
    # everything from here on is numbered by rank: a smaller number is the row to keep
    order = _order(sketches)
    rank = np.empty(num_rows, np.int64)
    rank[order] = np.arange(num_rows)
    kept_by = np.arange(num_rows)
    _drop_exact(sketches.digests(), order, reason, kept_by)
    groups = _Groups(num_rows)
    alive = (reason == 0) & (sketches.num_shingles > 0)
    num_passes, going_on = 0, True
    while going_on:
        num_passes, merged, more = num_passes + 1, 0, False
        for band in range(num_bands):
            united, larger = _merge_band(sketches, f"band_{band}", alive, order, rank, groups, similarity)
            merged, more = merged + united, more or larger
            tell(band + 1, num_bands)
        near = np.flatnonzero(alive & (groups.roots()[rank] != rank))
        alive[near] = False
        reason[near] = NEAR
        going_on = merged > 0 and more
    near = np.flatnonzero(reason == NEAR)
    kept_by[near] = order[groups.roots()[rank[near]]]
    exact = np.flatnonzero(reason == EXACT)
    kept_by[exact] = kept_by[kept_by[exact]]  # where that one is a near duplicate itself, the row that stays
    return Verdict(kept_by, reason, item, num_passes)


def jaccard(sketches: Sketches, left: Places, right: Places) -> NDArray[np.float64]:
    """The Jaccard index of the shingles of each pair of rows."""
    found = np.empty(len(left))
    sizes = np.cumsum(sketches.num_shingles[left] + sketches.num_shingles[right])
    at = 0
    while at < len(left):
        done = int(sizes[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(sizes, done + _SHINGLES_AT_ONCE, side="right")))
        one, other = (sketches.shingles(side[at:end]) for side in (left, right))
        found[at:end] = _jaccard(*one, *other)
        at = end
    return found


def _jaccard(one: Small, one_offsets: Places, other: Small, other_offsets: Places) -> NDArray[np.float64]:
    """Pair by pair: an n-gram that both sets have stands twice among the sorted n-grams of the pair."""
    keys = []
    for values, offsets in ((one, one_offsets), (other, other_offsets)):
        pair = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
        keys.append(pair << np.uint64(32) | values)
    merged = np.sort(np.concatenate(keys))
    twice = merged[1:][merged[1:] == merged[:-1]]
    shared = np.bincount((twice >> np.uint64(32)).astype(np.int64), minlength=len(one_offsets) - 1)
    return shared / (np.diff(one_offsets) + np.diff(other_offsets) - shared)


def _order(sketches: Sketches) -> Places:
    """The rows, the one to keep first; the last keys decide first."""
    columns = [sketches.column(name) for name in ("tie", "row_id", "num_chars", "preference")]
    columns[2] = -columns[2]
    return np.lexsort(columns)


def _drop_exact(digests: NDArray[Any], order: Places, reason: NDArray[np.uint8], kept_by: Places) -> None:
    """Of clean rows with one digest keep the first in order."""
    clean = order[reason[order] == 0]
    ranked = digests[clean]
    by_digest = np.lexsort((np.arange(len(clean)), ranked[:, 1], ranked[:, 0]))
    sorted_digests = ranked[by_digest]
    fresh = np.ones(len(clean), bool)
    fresh[1:] = (sorted_digests[1:] != sorted_digests[:-1]).any(axis=1)
    first = clean[by_digest[fresh]][np.cumsum(fresh) - 1] if len(clean) else clean
    kept_by[clean[by_digest]] = first
    reason[clean[by_digest[~fresh]]] = EXACT


def _merge_band(
    sketches: Sketches, name: str, alive: Marks, order: Places, rank: Places, groups: _Groups, similarity: float
) -> tuple[int, bool]:
    """Unite the rows of one band that are alike: (how many unions, whether a group was larger than the window)."""
    united, larger = 0, False
    shares = max(1, -(-int(alive.sum()) // _KEYS_AT_ONCE))
    for share in range(shares):
        rows, keys = sketches.in_range(name, alive, share, shares)
        ranks = rank[rows]
        by_key = np.lexsort((ranks, keys))
        for one, other, beyond in _candidates(keys[by_key], ranks[by_key]):
            larger |= beyond
            roots = groups.roots()
            apart = roots[one] != roots[other]
            left, right = one[apart], other[apart]
            alike = jaccard(sketches, order[left], order[right]) >= similarity
            united += groups.unite(left[alike], right[alike])
    return united, larger


def _candidates(keys: NDArray[np.uint64], ranks: Places) -> Iterator[tuple[Places, Places, bool]]:
    """Pairs of rows with equal keys, up to WINDOW places apart or one the first; whether pairs may be left out."""
    num = len(keys)
    for distance in range(1, WINDOW + 1):
        same = np.flatnonzero(keys[distance:] == keys[:-distance]) if distance < num else np.empty(0, np.int64)
        if not len(same):
            return
        yield ranks[same], ranks[same + distance], False
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    first = np.repeat(begins, np.diff(np.append(begins, num)))
    far = np.flatnonzero(np.arange(num) - first > WINDOW)
    if len(far):
        yield ranks[first[far]], ranks[far], True


class _Groups:
    """Disjoint sets of ranks; a set is named by its smallest rank (Tarjan's union-find with path halving)."""

    def __init__(self, count: int) -> None:
        self._parents = np.arange(count)

    def roots(self) -> Places:
        """The smallest rank of every rank's set."""
        while True:
            above = self._parents[self._parents]
            if (above == self._parents).all():
                return self._parents
            self._parents = above

    def unite(self, left: Places, right: Places) -> int:
        """Join the sets of each pair; how many joins it took."""
        parents, joins = self._parents, 0
        for pair in zip(left.tolist(), right.tolist(), strict=True):
            first, last = sorted(_root(parents, rank) for rank in pair)
            if first != last:
                parents[last] = first
                joins += 1
        return joins


def _root(parents: Places, rank: int) -> int:
    while (above := int(parents[rank])) != rank:
        parents[rank] = parents[above]
        rank = above
    return rank
