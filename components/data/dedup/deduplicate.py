"""Step `data.deduplicate`: removes benchmark contamination, exact and near duplicates, before a mix is made.

First a sharded pass computes a sketch of each part (sketches.py); finished sketches survive a kill. Then three passes
over the rows of all sources together remove contaminated rows (decontamination.py), exact duplicates, and near
duplicates. The rows that stay are written in their order.

Rows are ranked by their content alone (the preferred source, then the longer text, then the smaller row_id), and the
first row of each group stays. A group holds exact duplicates, by digest, and near duplicates: rows whose shingles have
a Jaccard index of at least `similarity`, joined by single linkage (A ~ B ~ C keeps A alone, also where A and C are less
similar). The result does not depend on the order of the rows or the number of workers. About a hundred bytes per row
are in memory; band hashes and shingles stay on disk and are read one range of hashes at a time.

Among rows with the same band hash, pairs within WINDOW ranks are compared, and each row with the first: boilerplate in
ten thousand rows costs a multiple of them, not their square. Where a group was larger, another pass compares the rows
that stay, until no more are dropped; so deduplicating twice removes nothing more.

`dropped.parquet` has the columns of every step (reason, source, where, excerpt) and these: row_id; kept_id and
kept_where, the row that stays instead, or the prompt_id and workload that a contaminated row holds; similarity, the
Jaccard index with the row that stays (it may be below the threshold for rows joined through others) or the share of the
prompt; matched, the normalised text of the prompt that the row holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from components.contract import Chats, Context, Prompts, UserError
from components.data.dedup.decontamination import MIN_TURN, Item, items_of, num_too_short, write_items
from components.data.dedup.sketches import CLEAN, Sketches, SketchShard, banding, sketch_part, turns_of
from components.data.dedup.text_units import Marks, Places, Small
from components.data.formats.chats import (
    COLUMNS,
    DROPPED,
    DROPPED_COLUMNS,
    EXCERPT_CHARACTERS,
    ChatWriter,
    file_batches,
    read_manifest,
)
from components.outside_json import JsonObject
from components.text import as_utf8

_ITEMS: Final = "benchmarks.parquet"
_NAMES: Final = ("row_id", "where", "source")
_DROPPED_COLUMNS: Final = (*DROPPED_COLUMNS, "row_id", "kept_id", "kept_where", "similarity", "matched")


def deduplicate(
    chats: list[Chats],
    keep_out: list[Prompts] | None,
    *,
    similarity: float,
    ngram: int,
    num_permutations: int,
    prefer: list[str] | None,
    benchmark_ngram: int,
    benchmark_overlap: float,
    ctx: Context,
) -> Chats:
    """The step `data.deduplicate`; its settings are explained in components/data/steps.py."""
    parts = [one.path / part for one in chats for part in read_manifest(one)["parts"]]
    items = items_of(keep_out or [])
    file = ctx.scratch / _ITEMS if items else None
    if file is not None:
        write_items(file, items)
        if short := num_too_short(items):
            ctx.note(f"{short} benchmark prompts are too short to be looked for (fewer than {MIN_TURN} words)")
    cut = banding(similarity, num_permutations)
    shards = [
        SketchShard(
            file=ctx.scratch / f"sketch-{number:05d}.arrow",
            part=part,
            ngram=ngram,
            num_permutations=num_permutations,
            cut=cut,
            preferred=tuple(prefer or ()),
            items=file,
            benchmark_ngram=benchmark_ngram,
            benchmark_overlap=benchmark_overlap,
        )
        for number, part in enumerate(parts)
    ]
    _check_preferred(prefer or [], chats)
    for _ in ctx.map(sketch_part, shards, what="parts read"):
        pass
    with Sketches([shard.file for shard in shards]) as sketches:
        decisions = decide_rows(
            sketches, cut.num_bands, similarity, lambda done, total: ctx.progress(done, total, "bands compared")
        )
        info = write_deduplicated(parts, sketches, decisions, items, ctx)
    _log_summary(info, ctx)
    facts = {"similarity": similarity, "num_bands": cut.num_bands, "band_length": cut.band_length}
    return Chats.of_step(ctx, {**info, **facts, "num_benchmark_texts": len(items)})


def _log_summary(info: JsonObject, ctx: Context) -> None:
    dropped = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in info["dropped"].items())
    ctx.note(f"{info['num_rows']} of {info['num_read']} rows stay; dropped: {dropped or 'none'}; see dropped.parquet")


def _check_preferred(prefer: Sequence[str], chats: Sequence[Chats]) -> None:
    sources = sorted({name for one in chats for name in read_manifest(one)["by_source"]})
    for name in prefer:
        if name not in sources:
            raise UserError(f"prefer: {name}: no row has this source; there are {', '.join(sources)}")


class _Match(NamedTuple):
    """The row that stays instead of a dropped one, or the benchmark text in it: columns of `dropped.parquet`."""

    kept_id: str
    kept_where: str
    similarity: float
    matched: str
    kept_source: str


def write_deduplicated(
    parts: Sequence[Path], sketches: Sketches, decisions: RowDecisions, items: Sequence[Item], ctx: Context
) -> JsonObject:
    """Write the parts, the manifest and `dropped.parquet`; returns the counts: read = kept + dropped."""
    matches = iter(_matches(parts, sketches, decisions, items))
    counts: Counter[str] = Counter()
    across: Counter[str] = Counter()
    kinds = {name: pyarrow.float64() if name == "similarity" else pyarrow.string() for name in _DROPPED_COLUMNS}
    schema = pyarrow.schema([pyarrow.field(name, kind, nullable=False) for name, kind in kinds.items()])
    start = 0
    with ChatWriter(ctx.out) as writer, parquet.ParquetWriter(ctx.out / DROPPED, schema, compression="zstd") as file:
        for batch in (batch for part in parts for batch in file_batches(part, COLUMNS)):
            reasons = decisions.reason[start : start + len(batch)]
            writer.write_batch(batch.filter(pyarrow.array(reasons == 0)))
            dropped = np.flatnonzero(reasons)
            rows: list[JsonObject] = []
            for number, row in zip(dropped, batch.take(pyarrow.array(dropped)).to_pylist(), strict=True):
                reason, match = REASONS[reasons[number]], next(matches)
                excerpt = as_utf8("\n\n".join(turns_of(row["text"], row["messages"]))[:EXCERPT_CHARACTERS])
                rows.append({**row, "reason": reason, "excerpt": excerpt, **match._asdict()})
                counts[reason] += 1
                across[f"{row['source']} -> {match.kept_source}"] += bool(match.kept_source)
            if rows:
                file.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=schema))
            start += len(batch)
            ctx.progress(start, sketches.num_rows, "rows written")
    num_dropped = sum(counts.values())
    assert start == sketches.num_rows == writer.num_rows + num_dropped, "a row was lost"
    by_workload = Counter(items[item].workload for item in decisions.item[decisions.reason == CONTAMINATED])
    return {
        "num_rows": writer.num_rows,
        "num_read": start,
        "num_dropped": num_dropped,
        "dropped": dict(counts.most_common()),
        "by_source": dict(sorted(writer.by_source.items())),
        "duplicates_between": dict(sorted((+across).items())),
        "contaminated_by_workload": dict(sorted(by_workload.items())),
        "passes": decisions.num_passes,
    }


def _matches(
    parts: Sequence[Path], sketches: Sketches, decisions: RowDecisions, items: Sequence[Item]
) -> Iterator[_Match]:
    """The match of each dropped row, in the order of the rows."""
    places = np.flatnonzero(decisions.reason)
    reasons, kept_by = decisions.reason[places], decisions.kept_by[places]
    stays = np.unique(kept_by[reasons != CONTAMINATED])
    names: list[tuple[str, str, str]] = []
    start = 0
    for batch in (batch for part in parts for batch in file_batches(part, _NAMES)):
        in_batch = stays[np.searchsorted(stays, start) : np.searchsorted(stays, start + len(batch))]
        kept = batch.take(pyarrow.array(in_batch - start))
        names += zip(*(kept.column(name).to_pylist() for name in _NAMES), strict=True)
        start += len(batch)
    near_at = np.flatnonzero(reasons == NEAR)
    similarity = np.ones(len(places))
    similarity[near_at] = jaccard(sketches, places[near_at], kept_by[near_at])
    contaminated = sketches.matched(places[reasons == CONTAMINATED])
    columns = (places, reasons, similarity, np.searchsorted(stays, kept_by))
    for place, reason, jaccard_index, number in zip(*(column.tolist() for column in columns), strict=True):
        if reason == CONTAMINATED:
            item, (share, matched) = items[int(decisions.item[place])], contaminated[place]
            yield _Match(item.prompt_id, item.workload, share, as_utf8(matched), "")
        else:
            row_id, location, source = names[number]
            yield _Match(row_id, location, jaccard_index, "", source)


WINDOW: Final = 16
_KEYS_AT_ONCE: Final = 1 << 22
_SHINGLES_AT_ONCE: Final = 1 << 22


@dataclass(frozen=True)
class RowDecisions:
    """For each row of the input whether it stays (arrays over rows).

    kept_by: the row that stays instead; the row itself where it stays. reason: an index of REASONS, 0 for rows that
    stay. item: the benchmark item that a contaminated row holds, else CLEAN.
    """

    kept_by: Places
    reason: NDArray[np.uint8]
    item: NDArray[np.int32]
    num_passes: int


REASONS: Final = ("", "exact_duplicate", "near_duplicate", "contaminated")
EXACT, NEAR, CONTAMINATED = 1, 2, 3


def decide_rows(
    sketches: Sketches,
    num_bands: int,
    similarity: float,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RowDecisions:
    """Decide which rows stay; contaminated rows are dropped first, so that clean near duplicates of them can stay.

    similarity: Jaccard index from which rows are near duplicates. report_progress: called with (bands done, num_bands).
    """
    num_rows = sketches.num_rows
    item = sketches.column("item").astype(np.int32)
    reason = np.where(item != CLEAN, CONTAMINATED, 0).astype(np.uint8)
    # groups are numbered by rank: the row with the smallest rank stays
    order = _rank_rows(sketches)
    rank = np.empty(num_rows, np.int64)
    rank[order] = np.arange(num_rows)
    kept_by = np.arange(num_rows)
    _drop_exact(sketches.digests(), order, reason, kept_by)
    groups = _Groups(num_rows)
    alive = (reason == 0) & (sketches.num_shingles > 0)
    num_passes, again = 0, True
    while again:
        num_passes, num_merged, any_left_out = num_passes + 1, 0, False
        for band in range(num_bands):
            num_unions, left_out = _merge_band(sketches, f"band_{band}", alive, order, rank, groups, similarity)
            num_merged, any_left_out = num_merged + num_unions, any_left_out or left_out
            report_progress(band + 1, num_bands)
        near = np.flatnonzero(alive & (groups.roots()[rank] != rank))
        alive[near] = False
        reason[near] = NEAR
        again = num_merged > 0 and any_left_out
    near = np.flatnonzero(reason == NEAR)
    kept_by[near] = order[groups.roots()[rank[near]]]
    exact = np.flatnonzero(reason == EXACT)
    kept_by[exact] = kept_by[kept_by[exact]]  # the row kept for an exact duplicate may be a near duplicate itself
    return RowDecisions(kept_by, reason, item, num_passes)


def jaccard(sketches: Sketches, rows: Places, others: Places) -> NDArray[np.float64]:
    """The Jaccard index of the shingles of each pair (rows[i], others[i])."""
    indices = np.empty(len(rows))
    sizes = np.cumsum(sketches.num_shingles[rows] + sketches.num_shingles[others])
    at = 0
    while at < len(rows):
        done = int(sizes[at - 1]) if at else 0
        end = max(at + 1, int(np.searchsorted(sizes, done + _SHINGLES_AT_ONCE, side="right")))
        first, second = (sketches.shingles(side[at:end]) for side in (rows, others))
        indices[at:end] = _jaccard(*first, *second)
        at = end
    return indices


def _jaccard(one: Small, one_offsets: Places, other: Small, other_offsets: Places) -> NDArray[np.float64]:
    """The Jaccard index of each pair of sets: a shared n-gram occurs twice among the sorted n-grams of the pair."""
    keys = []
    for values, offsets in ((one, one_offsets), (other, other_offsets)):
        pair = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
        keys.append(pair << np.uint64(32) | values)
    merged = np.sort(np.concatenate(keys))
    twice = merged[1:][merged[1:] == merged[:-1]]
    shared = np.bincount((twice >> np.uint64(32)).astype(np.int64), minlength=len(one_offsets) - 1)
    return shared / (np.diff(one_offsets) + np.diff(other_offsets) - shared)


def _rank_rows(sketches: Sketches) -> Places:
    """The rows by rank, the row to keep first."""
    columns = [sketches.column(name) for name in ("tie", "row_id", "num_chars", "preference")]
    columns[2] = -columns[2]
    return np.lexsort(columns)  # the last column decides first


def _drop_exact(digests: NDArray[Any], order: Places, reason: NDArray[np.uint8], kept_by: Places) -> None:
    """Mark all but the first of the clean rows with the same digest as exact duplicates."""
    clean = order[reason[order] == 0]
    ranked = digests[clean]
    by_digest = np.lexsort((np.arange(len(clean)), ranked[:, 1], ranked[:, 0]))
    sorted_digests = ranked[by_digest]
    is_first = np.ones(len(clean), bool)
    is_first[1:] = (sorted_digests[1:] != sorted_digests[:-1]).any(axis=1)
    first = clean[by_digest[is_first]][np.cumsum(is_first) - 1] if len(clean) else clean
    kept_by[clean[by_digest]] = first
    reason[clean[by_digest[~is_first]]] = EXACT


def _merge_band(
    sketches: Sketches, name: str, alive: Marks, order: Places, rank: Places, groups: _Groups, similarity: float
) -> tuple[int, bool]:
    """Unite the similar rows of one band: (number of unions, whether pairs beyond the window were left out)."""
    num_unions, left_out = 0, False
    shares = max(1, -(-int(alive.sum()) // _KEYS_AT_ONCE))
    for share in range(shares):
        rows, keys = sketches.in_range(name, alive, share, shares)
        ranks = rank[rows]
        by_key = np.lexsort((ranks, keys))
        for one, other, incomplete in _candidates(keys[by_key], ranks[by_key]):
            left_out |= incomplete
            roots = groups.roots()
            separate = roots[one] != roots[other]
            first, second = one[separate], other[separate]
            similar = jaccard(sketches, order[first], order[second]) >= similarity
            num_unions += groups.unite(first[similar], second[similar])
    return num_unions, left_out


def _candidates(keys: NDArray[np.uint64], ranks: Places) -> Iterator[tuple[Places, Places, bool]]:
    """(ranks, partners, whether pairs are left out): pairs with equal keys within WINDOW or with the first."""
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
    """Disjoint sets of ranks, each represented by its smallest (Tarjan's union-find with path halving)."""

    def __init__(self, count: int) -> None:
        self._parents = np.arange(count)

    def roots(self) -> Places:
        """The smallest rank of every rank's set."""
        while True:
            above = self._parents[self._parents]
            if (above == self._parents).all():
                return self._parents
            self._parents = above

    def unite(self, ranks: Places, others: Places) -> int:
        """Join the sets of each pair; returns the number of joins."""
        parents, joins = self._parents, 0
        for pair in zip(ranks.tolist(), others.tolist(), strict=True):
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
