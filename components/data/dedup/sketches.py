"""Sketches of rows: files of numbers beside the texts, from which duplicates are found.

A sketch holds for each row of one part of a Chats artifact what decides which of two duplicates stays, the digest of
the whole text for exact duplicates, the band hashes and sorted shingles of MinHash, and the benchmark prompt that the
row contains (decontamination.py). It is an Arrow IPC file. `Sketches` maps the files of all parts into memory as one
table: single columns are read, and band hashes and shingles occupy only the page cache.

The similarity of two texts is the Jaccard index of their sets of n-grams (shingles): shared / all. Under a random
permutation both sets have the same smallest element with that probability (Broder 1997), so the share of equal elements
of two MinHash signatures estimates it, with a standard error of sqrt(s (1 - s) / num_permutations). The permutations
are those of datasketch 2 ("affine32": h -> a h + b mod 2^32 with odd a, after murmur3's finaliser), applied to a whole
batch instead of one object per text; a test compares the signatures with that library's.

A signature is cut into b bands of r elements. Two texts of similarity s have an equal band with probability
1 - (1 - s^r)^b, an S-curve (Leskovec, Rajaraman, Ullman: Mining of Massive Datasets, 3.4). Equal bands are candidates
only, whose shingles are compared (deduplicate.py). So b and r cost time or recall, never precision; `banding` takes the
longest bands by which 99 % of the pairs at the threshold still become candidates. With 128 permutations:

    threshold   b x r    a pair of similarity  0.3    0.5    0.6    0.7    0.8    0.9  meets with probability
    0.7         32 x 4                         .229   .873   .988   1      1      1
    0.8         21 x 6                         .015   .282   .633   .928   .998   1
    0.9         12 x 10                        .000   .012   .070   .291   .744   .994
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow
from numpy.typing import NDArray
from pyarrow import parquet

from components.contract import ReportProgress
from components.data.dedup.decontamination import Hit, cached_index
from components.data.dedup.text_units import Hashes, Marks, Places, Small, mix_bits, ngrams, normalised, units_of
from components.data.sources.turns import Message
from components.files import written_whole

READ: Final = ("row_id", "source", "where", "text", "messages", "num_chars")
CLEAN: Final = -1
"""The item of a row that holds no benchmark item."""
_BATCH_ROWS: Final = 1024
_BATCH_CHARACTERS: Final = 1 << 19
"""Characters in one batch: its arrays fit into the cache of a core, and it alone bounds the memory."""
_WRITTEN_BYTES: Final = 16 << 20
"""Bytes of a sketch that are written at once."""


@dataclass(frozen=True)
class SketchShard:
    """The inputs of the sketch of one part, and its file.

    preferred: source names, the best first. items: file of the benchmarks' texts, or None.
    """

    file: Path
    part: Path
    ngram: int
    num_permutations: int
    cut: Banding
    preferred: tuple[str, ...]
    items: Path | None
    benchmark_ngram: int
    benchmark_overlap: float


@dataclass(frozen=True)
class _Batch:
    """Rows that are sketched together.

    rows: (row_id, source, where, num_chars) of each. turns: of all rows, normalised. turns_of_row: their number by row.
    """

    rows: list[tuple[str, str, str, int]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    turns_of_row: list[int] = field(default_factory=list)


def sketch_part(shard: SketchShard, report_progress: ReportProgress) -> int:
    """Write the sketch of one part; returns its number of rows. Runs in any process that sees the paths."""
    schema = sketch_schema(shard.cut)
    done = size = 0
    with (
        written_whole(shard.file) as partial,
        parquet.ParquetFile(shard.part) as part,
        pyarrow.OSFile(str(partial), "wb") as sink,
        pyarrow.ipc.new_file(sink, schema) as writer,
    ):
        total = part.metadata.num_rows
        waiting: list[pyarrow.RecordBatch] = []
        for batch in _batches(part):
            waiting.append(_sketch(batch, shard, schema))
            done, size = done + len(batch.rows), size + waiting[-1].nbytes
            if size >= _WRITTEN_BYTES or done == total:
                writer.write_batch(pyarrow.Table.from_batches(waiting).combine_chunks().to_batches()[0])
                waiting, size = [], 0
            report_progress(done / total)
    return done


def sketch_schema(cut: Banding) -> pyarrow.Schema:
    """The columns of a sketch; nothing is null.

    preference: rank of the row's source among the preferred ones. tie: a hash of source and where. item, share,
    matched: the benchmark item in the row (CLEAN: none). band_N: the key of each band, 0 for a row without shingles.
    """
    wide, text = pyarrow.uint64(), pyarrow.string()
    columns = {"digest": pyarrow.binary(16), "preference": pyarrow.uint32(), "num_chars": pyarrow.int64()}
    columns |= {"row_id": wide, "tie": wide, "item": pyarrow.int32(), "share": pyarrow.float64(), "matched": text}
    columns |= {f"band_{number}": wide for number in range(cut.num_bands)}
    columns |= {"shingles": pyarrow.large_list(pyarrow.field("item", pyarrow.uint32(), nullable=False))}
    return pyarrow.schema([pyarrow.field(name, kind, nullable=False) for name, kind in columns.items()])


def turns_of(text: str, messages: str) -> list[str]:
    """The texts of a row's turns, with reasoning and tool calls; a document is one turn."""
    return [_message_text(message) for message in json.loads(messages)] if messages else [text]


def _message_text(message: Message) -> str:
    text: str = message.get("content") or ""
    if message.get("reasoning_content"):
        text = f"{message['reasoning_content']}\n{text}"
    if message.get("tool_calls"):
        text = f"{text}\n{json.dumps(message['tool_calls'], ensure_ascii=False, sort_keys=True)}"
    return text


def digest_of(turns: Sequence[str]) -> bytes:
    """A 128-bit digest of normalised turns; white space counts only as a separator of words."""
    joined = "\x1e".join(" ".join(turn.split()) for turn in turns)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(part: Any) -> Iterator[_Batch]:
    """The rows of a part in batches of about _BATCH_CHARACTERS."""
    for group in part.iter_batches(batch_size=_BATCH_ROWS, columns=list(READ)):
        columns = [group.column(name).to_pylist() for name in READ]
        batch, size = _Batch(), 0
        for row_id, source, location, text, messages, num_chars in zip(*columns, strict=True):
            turns = [normalised(turn) for turn in turns_of(text, messages)]
            batch.rows.append((row_id, source, location, num_chars))
            batch.turns.extend(turns)
            batch.turns_of_row.append(len(turns))
            size += sum(map(len, turns))
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = _Batch(), 0
        if batch.rows:
            yield batch


def _sketch(batch: _Batch, shard: SketchShard, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    num_rows = len(batch.rows)
    turns = units_of(batch.turns)
    rows = turns.joined(batch.turns_of_row)
    shingles, offsets = shingle_sets(*ngrams(rows, shard.ngram)[::2])
    filled = np.flatnonzero(np.diff(offsets))
    minima = signatures(shingles, np.append(offsets[filled], offsets[-1]), shard.num_permutations)
    keys = np.zeros((shard.cut.num_bands, num_rows), np.uint64)
    keys[:, filled] = band_keys(minima, shard.cut)
    hits: list[Hit] = []
    if shard.items is not None:
        index = cached_index(shard.items, shard.benchmark_ngram, shard.benchmark_overlap)
        hits = index.hits(batch.turns, turns, rows, batch.turns_of_row)
    items, shares, matched = np.full(num_rows, CLEAN, np.int32), np.zeros(num_rows), [""] * num_rows
    for hit in hits:
        items[hit.row], shares[hit.row], matched[hit.row] = hit.item, hit.share, hit.matched
    row_ids, sources, locations, sizes = zip(*batch.rows, strict=True)
    preferences = {source: number for number, source in enumerate(shard.preferred)}
    ends = np.cumsum(batch.turns_of_row).tolist()
    columns: dict[str, object] = {
        "digest": [digest_of(batch.turns[end - n : end]) for end, n in zip(ends, batch.turns_of_row, strict=True)],
        "preference": [preferences.get(source, len(preferences)) for source in sources],
        "num_chars": sizes,
        "row_id": np.frombuffer(bytes.fromhex("".join(row_ids)), ">u8").astype(np.uint64),
        "tie": [_tie_breaker(source, place) for source, place in zip(sources, locations, strict=True)],
        "item": items,
        "share": shares,
        "matched": matched,
        **{f"band_{number}": key for number, key in enumerate(keys)},
    }
    arrays = [pyarrow.array(columns[field.name], field.type) for field in list(schema)[:-1]]
    shingle_type = schema.field("shingles").type
    arrays.append(pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(shingles), type=shingle_type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _tie_breaker(source: str, location: str) -> int:
    """A hash of a row's origin, which ranks rows of equal content."""
    return int.from_bytes(hashlib.blake2b(f"{source}\0{location}".encode(), digest_size=8).digest(), "big")


class Sketches:
    """The sketches of all parts as one table; rows are numbered through all files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._stack = contextlib.ExitStack()
        self._readers = [self._open(file) for file in self.files]
        self._lists = [
            (number, index) for number, reader in enumerate(self._readers) for index in range(reader.num_record_batches)
        ]
        ends = [self._batch(*at).column("shingles").offsets.to_numpy() for at in self._lists]
        self.starts: Places = np.cumsum([0, *(len(end) - 1 for end in ends)])
        self._begins: Places = np.concatenate([np.empty(0, np.int64), *(end[:-1] for end in ends)])
        self.num_shingles: Places = np.concatenate([np.empty(0, np.int64), *(np.diff(end) for end in ends)])

    def __enter__(self) -> Sketches:
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.clear()
        self._stack.close()

    @property
    def num_rows(self) -> int:
        """Number of rows in all parts."""
        return int(self.starts[-1])

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers for all rows."""
        parts = [self._numbers(at, name) for at in self._lists]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def digests(self) -> NDArray[Any]:
        """The digests of whole texts as two 64-bit halves, [num_rows, 2]."""
        buffers = [self._batch(*at).column("digest").buffers()[1] for at in self._lists]
        sizes = np.diff(self.starts)
        halves = [
            np.frombuffer(buffer, np.uint64, 2 * size).reshape(-1, 2)
            for buffer, size in zip(buffers, sizes, strict=True)
        ]
        return np.concatenate([np.empty((0, 2), np.uint64), *halves])

    def in_range(self, name: str, selected: Marks, share: int, shares: int) -> tuple[Places, NDArray[np.uint64]]:
        """(rows, keys) of the selected rows whose key lies in the share-th of `shares` equal ranges."""
        rows, keys = [], []
        width = np.uint64((1 << 64) // shares) if shares > 1 else None
        for number, at in enumerate(self._lists):
            hashes = self._numbers(at, name)
            in_file = selected[self.starts[number] : self.starts[number + 1]]
            if width is not None:
                in_file = in_file & (np.minimum(hashes // width, np.uint64(shares - 1)) == np.uint64(share))
            positions = np.flatnonzero(in_file)
            rows.append(positions + self.starts[number])
            keys.append(hashes[positions])
        return np.concatenate([np.empty(0, np.int64), *rows]), np.concatenate([np.empty(0, np.uint64), *keys])

    def shingles(self, rows: Places) -> tuple[Small, Places]:
        """(the sorted shingles of these rows, at least one, one after the other; their offsets)."""
        lengths, begins = self.num_shingles[rows], self._begins[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        shingles = np.empty(offsets[-1], np.uint32)
        batch_of_row = np.searchsorted(self.starts, rows, side="right") - 1
        order = np.argsort(batch_of_row, kind="stable")
        edges = np.flatnonzero(np.append(True, np.diff(batch_of_row[order]) > 0))
        for first, last in zip(edges, np.append(edges[1:], len(rows)), strict=True):
            of_batch = order[first:last]
            values = self._batch(*self._lists[batch_of_row[of_batch[0]]]).column("shingles").values.to_numpy()
            sizes = lengths[of_batch]
            shingles[_ranges(offsets[of_batch], sizes)] = values[_ranges(begins[of_batch], sizes)]
        return shingles, offsets

    def matched(self, rows: Places) -> dict[int, tuple[float, str]]:
        """Row -> (share, matched) of contaminated rows."""
        row_set, matches = set(rows.tolist()), {}
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1):
            batch, start = self._batch(*self._lists[number]), int(self.starts[number])
            for index in np.flatnonzero(batch.column("item").to_numpy() != CLEAN).tolist():
                if start + index in row_set:
                    matches[start + index] = (
                        batch.column("share")[index].as_py(),
                        batch.column("matched")[index].as_py(),
                    )
        return matches

    def _open(self, file: Path) -> Any:
        return pyarrow.ipc.open_file(self._stack.enter_context(pyarrow.memory_map(str(file))))

    def _batch(self, number: int, index: int) -> Any:
        return self._readers[number].get_batch(index)

    def _numbers(self, at: tuple[int, int], name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._batch(*at).column(name).to_numpy()
        return values


def _ranges(begins: Places, lengths: Places) -> Places:
    """The numbers of all ranges begins[i] to begins[i] + lengths[i], one range after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(begins - (ends - lengths), lengths)


MIN_RECALL: Final = 0.99
"""The share of pairs exactly at the threshold that must become candidates."""
_SEED: Final = 1


@dataclass(frozen=True)
class Banding:
    """Signatures are cut into num_bands bands of band_length elements each."""

    num_bands: int
    band_length: int

    def chance(self, similarity: float) -> float:
        """The probability that a pair of this similarity has an equal band."""
        return float(1.0 - (1.0 - similarity**self.band_length) ** self.num_bands)


def banding(similarity: float, num_permutations: int) -> Banding:
    """The longest bands (fewest candidates) that find pairs of this similarity with probability MIN_RECALL."""
    candidates = [
        bands
        for length in range(1, num_permutations + 1)
        if (bands := Banding(num_permutations // length, length)).chance(similarity) >= MIN_RECALL
    ]
    return candidates[-1] if candidates else Banding(num_permutations, 1)


def shingle_sets(hashes: Hashes, offsets: Places) -> tuple[Small, Places]:
    """(the distinct n-grams of each text as sorted 32-bit hashes, their offsets by text).

    32 bits are enough: of two texts with a thousand n-grams each, one pair in four thousand would share a false one.
    """
    texts = np.repeat(np.arange(len(offsets) - 1, dtype=np.uint64), np.diff(offsets))
    keys = np.sort(texts << np.uint64(32) | hashes >> np.uint64(32))
    keys = keys[np.concatenate([[True], keys[1:] != keys[:-1]])] if len(keys) else keys
    counts = np.bincount((keys >> np.uint64(32)).astype(np.int64), minlength=len(offsets) - 1)
    return keys.astype(np.uint32), np.concatenate([[0], np.cumsum(counts)])


def signatures(shingles: Small, offsets: Places, num_permutations: int) -> Small:
    """The signature of each set, [num_permutations, num_sets]; no set may be empty."""
    minima = np.empty((num_permutations, len(offsets) - 1), np.uint32)
    if not len(shingles):
        return minima
    assert (np.diff(offsets) > 0).all(), "an empty set has no smallest element"
    values, permuted = _murmur_mixed(shingles), np.empty_like(shingles)
    factors, summands = permutations(num_permutations)
    for number in range(num_permutations):
        np.multiply(values, factors[number], out=permuted)
        np.add(permuted, summands[number], out=permuted)
        np.minimum.reduceat(permuted, offsets[:-1], out=minima[number])
    return minima


def band_keys(minima: Small, bands: Banding) -> Hashes:
    """Band hashes [num_bands, num_sets] of signatures: equal keys mean equal bands, up to collisions of 64 bits."""
    keys = np.zeros((bands.num_bands, minima.shape[1]), np.uint64)
    for band in range(bands.num_bands):
        for place in range(bands.band_length):
            keys[band] = mix_bits(keys[band] + minima[band * bands.band_length + place])
    return keys


@functools.lru_cache(maxsize=4)
def permutations(count: int) -> tuple[Small, Small]:
    """(odd factors, summands) of the affine permutations: those of datasketch's MinHash(count, seed=1)."""
    generator = np.random.RandomState(_SEED)
    factors = generator.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, generator.randint(0, 1 << 32, count, dtype=np.uint32)


def _murmur_mixed(values: Small) -> Small:
    """The finaliser of MurmurHash3 with 32 bits, a bijection (Appleby)."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
