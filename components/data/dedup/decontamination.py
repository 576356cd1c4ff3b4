"""Finds training rows that contain a benchmark's prompts or reference answers, by shared n-grams.

An item to search for is a text prompt, a user turn or a reference answer of the splits test and warm_up. A row is
contaminated when it contains at least the share `overlap` of an item's n-grams, anywhere in the row: case, width,
punctuation and white space do not count (text_units.py); paraphrases are not detected. Text that occurs in more than
MAX_SHARED items is boilerplate (a template's "think step by step ..."), and n-grams that overlap it do not count,
unless an item has no others. Items of fewer than n units have no n-gram: from MIN_INSIDE units on they are searched as
a whole inside texts, from MIN_TURN on only as a whole turn ("Rewrite it as a limerick"), shorter ones not at all.

GPT-3 used n-grams of 13 words and counted one in common as contamination (Brown et al. 2020, appendix C). Llama 2
required a share of the prompt (Touvron et al. 2023, appendix A.6), which has fewer accidental matches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow
from pyarrow import parquet

from components.contract import Prompts, UserError
from components.data.dedup.text_units import Hashes, Marks, Places, Units, ngrams, normalised, units_of
from components.data.formats.prompts import Prompt, read_prompts

EVALUATION_SPLITS: Final = ("test", "warm_up")
"""The splits whose prompts must not be trained on."""
MAX_SHARED: Final = 4
MIN_INSIDE: Final = 8
MIN_TURN: Final = 4
_FILTER_BITS_PER_KEY: Final = 16
_MAX_MATCHED: Final = 500


@dataclass(frozen=True)
class Item:
    """A text that must not be trained on. part: "prompt" or "reference"."""

    prompt_id: str
    workload: str
    part: str
    text: str


@dataclass(frozen=True)
class Hit:
    """A row that contains an item. share: of the item's n-grams, 0 to 1. matched: the normalised text in the row."""

    row: int
    item: int
    share: float
    matched: str


@dataclass(frozen=True)
class _Table:
    """Sorted hashes and their owners: those of the hash number h are owners[offsets[h]:offsets[h + 1]]."""

    hashes: Hashes
    owners: Places
    offsets: Places

    @classmethod
    def of(cls, hashes: Hashes, owners: Places) -> _Table:
        """The table of the distinct pairs (hash, owner)."""
        order = np.lexsort((owners, hashes))
        hashes, owners = hashes[order], owners[order]
        fresh = np.ones(len(hashes), bool)
        fresh[1:] = (hashes[1:] != hashes[:-1]) | (owners[1:] != owners[:-1])
        hashes, owners = hashes[fresh], owners[fresh]
        distinct, first = np.unique(hashes, return_index=True)
        return cls(distinct, owners, np.append(first, len(hashes)).astype(np.int64))

    @functools.cached_property
    def _filter(self) -> tuple[Marks, np.uint64]:
        """A table of the leading bits that occur: most texts share nothing, and this check is ten times as fast."""
        bits = max(8, (len(self.hashes) * _FILTER_BITS_PER_KEY).bit_length())
        shift = np.uint64(64 - bits)
        occurs = np.zeros(1 << bits, bool)
        occurs[self.hashes >> shift] = True
        return occurs, shift

    def find(self, hashes: Hashes) -> tuple[Places, Places]:
        """(index into `hashes`, number in the table) of each of `hashes` that is in the table."""
        if not len(self.hashes):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        occurs, shift = self._filter
        likely = np.flatnonzero(occurs[hashes >> shift])
        number = np.minimum(np.searchsorted(self.hashes, hashes[likely]), len(self.hashes) - 1)
        here = self.hashes[number] == hashes[likely]
        return likely[here], number[here]

    def expanded(self, which: Places, number: Places) -> tuple[Places, Places, Places]:
        """(which, number, owner), one entry for each owner."""
        counts = self.offsets[number + 1] - self.offsets[number]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return (
            np.repeat(which, counts),
            np.repeat(number, counts),
            self.owners[np.repeat(self.offsets[number], counts) + within],
        )


class BenchmarkIndex:
    """An index of the n-grams of many items, to be searched for in batches of rows.

    n: units of an n-gram. overlap: the share of an item's n-grams that a row must contain.
    """

    def __init__(self, items: Sequence[Item], n: int, overlap: float) -> None:
        self.items, self.n, self.overlap = list(items), n, overlap
        units = units_of([normalised(item.text) for item in self.items])
        lengths = np.diff(units.offsets)
        self._grams, runs = _identifying_parts(units, n)
        self._sizes = np.bincount(self._grams.owners, minlength=len(lengths))
        owners, firsts, lasts = runs
        hashes, sizes = units.runs(firsts, lasts), lasts - firsts
        self._inside = {int(size): _Table.of(hashes[sizes == size], owners[sizes == size]) for size in np.unique(sizes)}
        turns = np.flatnonzero((lengths < min(MIN_INSIDE, n)) & (lengths >= MIN_TURN))
        self._turns = _Table.of(units.runs(units.offsets[turns], units.offsets[turns + 1]), turns)

    def hits(self, texts: Sequence[str], turns: Units, rows: Units, turns_of_row: Sequence[int]) -> list[Hit]:
        """The rows of a batch that contain an item, each once, with the item of which it contains the largest share.

        texts: the normalised turns of all rows. turns: their units. rows: the same units, by row.
        """
        best: dict[int, tuple[float, int, int, int]] = {}  # row -> (share, item, first and last unit)
        matches = [*self._by_ngrams(rows), *self._by_whole(rows), *self._by_turn(turns, turns_of_row)]
        for row, item, share, first, last in matches:
            so_far = best.get(row)
            if so_far is None or (share, -item) > (so_far[0], -so_far[1]):
                best[row] = (share, item, first, last)
        if not best:
            return []
        joined = "\n".join(texts)
        return [
            Hit(row, item, share, joined[int(rows.begins[first]) : int(rows.ends[last - 1])][:_MAX_MATCHED])
            for row, (share, item, first, last) in sorted(best.items())
        ]

    def _by_ngrams(self, rows: Units) -> Iterator[tuple[int, int, float, int, int]]:
        """(row, item, share, first unit, last unit + 1) where a row contains enough of an item's n-grams."""
        hashes, firsts, offsets = ngrams(rows, self.n)
        which, number, owner = self._grams.expanded(*self._grams.find(hashes))
        if not len(which):
            return
        row = np.searchsorted(offsets, which, side="right") - 1
        order = np.lexsort((which, number, owner, row))
        which, number, owner, row = which[order], number[order], owner[order], row[order]
        group = np.flatnonzero(np.append(True, (row[1:] != row[:-1]) | (owner[1:] != owner[:-1])))
        fresh = np.append(True, number[1:] != number[:-1])
        fresh[group] = True  # an n-gram that a row repeats counts once
        shares = np.add.reduceat(fresh.astype(np.int64), group) / self._sizes[owner[group]]
        places = firsts[which]
        begins, ends = np.minimum.reduceat(places, group), np.maximum.reduceat(places, group) + self.n
        for at in np.flatnonzero(shares >= self.overlap):
            start = group[at]
            yield int(row[start]), int(owner[start]), float(shares[at]), int(begins[at]), int(ends[at])

    def _by_whole(self, rows: Units) -> Iterator[tuple[int, int, float, int, int]]:
        for length, table in self._inside.items():
            hashes, firsts, offsets = ngrams(rows, length)
            which, _, owner = table.expanded(*table.find(hashes))
            row = np.searchsorted(offsets, which, side="right") - 1
            for at, one in enumerate(which):
                first = int(firsts[one])
                yield int(row[at]), int(owner[at]), 1.0, first, first + length

    def _by_turn(self, turns: Units, turns_of_row: Sequence[int]) -> Iterator[tuple[int, int, float, int, int]]:
        hashes = turns.runs(turns.offsets[:-1], turns.offsets[1:])
        which, _, owner = self._turns.expanded(*self._turns.find(hashes))
        row = np.searchsorted(np.cumsum(turns_of_row), which, side="right")
        for at, turn in enumerate(which):
            yield int(row[at]), int(owner[at]), 1.0, int(turns.offsets[turn]), int(turns.offsets[turn + 1])


def items_of(keep_out: Sequence[Prompts]) -> list[Item]:
    """The distinct texts that must not be trained on, in an order that does not depend on that of the artifacts.

    Raises UserError where an artifact has no prompt in the splits test and warm_up.
    """
    items: dict[str, Item] = {}
    prompts = []
    for artifact in keep_out:
        evaluated = [prompt for split in EVALUATION_SPLITS for prompt in read_prompts(artifact, split)]
        if not evaluated:
            raise UserError(f"keep_out: {artifact.path}: no prompt in its splits test and warm_up; wire a benchmark's")
        prompts += evaluated
    for prompt in sorted(prompts, key=lambda prompt: (prompt.workload, prompt.prompt_id)):
        for part, text in _texts_of(prompt):
            items.setdefault(normalised(text), Item(prompt.prompt_id, prompt.workload, part, text))
    return list(items.values())


def num_too_short(items: Sequence[Item]) -> int:
    """How many prompts have too few units to be searched for."""
    units = units_of([normalised(item.text) for item in items if item.part == "prompt"])
    return int((np.diff(units.offsets) < MIN_TURN).sum())


def _texts_of(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """(part, text) of a prompt; of a chat only the user turns: system prompts and answers are not the benchmark's."""
    if prompt.messages is None:
        yield "prompt", prompt.text or ""
    for message in prompt.messages or ():
        if message["role"] == "user":
            yield "prompt", str(message["content"])
    if prompt.reference:
        yield "reference", prompt.reference


def _identifying_parts(units: Units, n: int) -> tuple[_Table, tuple[Places, Places, Places]]:
    """The parts that identify each text: its n-grams, or one shorter run (text, first unit, last unit + 1).

    Boilerplate is a run of half an n-gram that more than MAX_SHARED texts contain; so a template's words do not count
    as part of a question's last n-grams. A text is identified by its n-grams without boilerplate; if it has none, by
    its longest run without boilerplate, of at least MIN_INSIDE units; else, if too short for an n-gram, by all of it;
    else by its less frequent n-grams; and if it has none of those, by all n-grams.
    """
    hashes, firsts, owners = _owned(units, n)
    marked = _boilerplate(units, max(n // 2, MIN_TURN))
    before = np.concatenate([[0], np.cumsum(marked)])
    identifying = before[firsts + n] == before[firsts]
    num_texts = len(units.offsets) - 1
    without = np.flatnonzero(np.bincount(owners[identifying], minlength=num_texts) == 0)
    runs = [(text, *_longest_run(marked, *units.offsets[text : text + 2].tolist())) for text in without.tolist()]
    runs = [run for run in runs if run[2] - run[1] >= min(MIN_INSIDE, n)]
    lengths, has_run = np.diff(units.offsets), {run[0] for run in runs}
    runs += [
        (text, *units.offsets[text : text + 2].tolist())
        for text in without.tolist()
        if text not in has_run and min(MIN_INSIDE, n) <= lengths[text] < n
    ]
    covered = np.zeros(num_texts, bool)
    covered[[run[0] for run in runs]] = True
    for further in (~_are_frequent(hashes, owners), np.ones(len(hashes), bool)):
        has_some = covered | (np.bincount(owners[identifying], minlength=num_texts) > 0)
        identifying |= further & ~has_some[owners]
    texts, begins, ends = np.array(runs, np.int64).reshape(-1, 3).T
    return _Table.of(hashes[identifying], owners[identifying]), (texts, begins, ends)


def _boilerplate(units: Units, n: int) -> Marks:
    """Which units are part of a frequent n-gram."""
    hashes, firsts, owners = _owned(units, n)
    frequent = firsts[_are_frequent(hashes, owners)]
    edges = np.zeros(len(units.hashes) + 1, np.int64)
    np.add.at(edges, frequent, 1)
    np.add.at(edges, frequent + n, -1)
    marked: Marks = np.cumsum(edges)[:-1] > 0
    return marked


def _longest_run(marked: Marks, first: int, last: int) -> tuple[int, int]:
    """(first, last + 1) of the longest run of unmarked units in first .. last - 1; the first of several."""
    stops = np.concatenate([[first - 1], first + np.flatnonzero(marked[first:last]), [last]])
    at = int(np.argmax(np.diff(stops)))
    return int(stops[at]) + 1, int(stops[at + 1])


def _owned(units: Units, n: int) -> tuple[Hashes, Places, Places]:
    """(hash, first unit, text) of every n-gram."""
    hashes, firsts, offsets = ngrams(units, n)
    return hashes, firsts, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _are_frequent(hashes: Hashes, owners: Places) -> Marks:
    """Which of the n-grams occur in more than MAX_SHARED texts."""
    table = _Table.of(hashes, owners)
    shared: Marks = np.diff(table.offsets)[np.searchsorted(table.hashes, hashes)] > MAX_SHARED
    return shared


def write_items(file: Path, items: Sequence[Item]) -> None:
    """Write items to a file for the workers that search for them."""
    rows = [vars(item) for item in items]
    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("prompt_id", "workload", "part", "text")])
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), file)


@functools.lru_cache(maxsize=1)
def cached_index(file: Path, n: int, overlap: float) -> BenchmarkIndex:
    """The index of the items in a file, built once in each process."""
    return BenchmarkIndex([Item(**row) for row in parquet.read_table(file).to_pylist()], n, overlap)
